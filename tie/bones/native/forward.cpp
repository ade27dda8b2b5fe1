// One forward step: rows of tokens in, keys and values into the cache, logits out.
//
// All members of the team run `Forward::run` side by side and meet after each phase:
//
//   embed, angles | per layer:  norm, QKV | attention | output, + | norm, gate-up | down, + |   norm, head
//
// A phase's result is made where the next phase wants it: QKV files keys and values in the cache, attention's last task
// on some rows turns them into activations for the output projection, and gate-up into those for the down projection.
#include "forward.h"

#include <algorithm>

#include "attention.h"

namespace tie {
namespace {

struct Row {
  int token, position;
  const int64_t* blocks;  // its sequence's table
};

// Rows of one slice that attend together, and the blocks of its table that they see.
struct Piece {
  int row, rows;
  int first_block, last_block;
};

constexpr int kGroupTiles = 2 * kGroup / kTileRows;  // of gate and up projection, for a group of their product
constexpr int kOwnRows = 4;  // up to so many rows, every member normalises all of them for itself: cheaper than to meet

class Forward {
 public:
  Forward(const Model& model, const Batch& batch, Workspace& space, Team& team)
      : model_(model), shape_(model.shape), batch_(batch), team_(team), size_(part_size(shape_)) {
    take_rows();
    hidden_ = round_up(shape_.hidden, kGroup);
    row_floats_ = round_up(std::max(shape_.hidden, shape_.query_width()), kGroup);
    const size_t rows = rows_.size(), members = batch.threads;
    space.begin();
    residual_ = space.take<float>(rows * hidden_);
    queries_ = space.take<uint16_t>(rows * shape_.heads * shape_.whole_dim());
    angles_ = space.take<float>(rows * shape_.head_dim);
    member_rows_ = space.take<float>(members * row_floats_);
    scratch_ = space.take<AttentionScratch>(members);
    input_ = room(space, shape_.hidden, members);
    mixed_ = room(space, shape_.query_width());
    inner_ = room(space, shape_.intermediate);
    parts_ = space.take<float>(rows * splits_ * shape_.heads * size_);
  }

  void run(int member) {
    team_.share(rows(), 1, [&](int first, int last) {
      for (int row = first; row < last; ++row) begin_row(row);
    });
    for (int number = 0; number < shape_.layers; ++number) {
      const Layer& layer = model_.layers[number];
      Activations x = normalised(member, rows(), nullptr, layer.attention_norm, layer.qkv);
      team_.share(shape_.all_heads(), 1, [&](int head, int) {
        const int tiles = shape_.whole_dim() / kTileRows;
        multiply(layer.qkv, head * tiles, (head + 1) * tiles, x, rows(),
                 [&](int row, float* values) { file(number, row, head, values); });
      });
      Activations mixed = mixed_.shaped(rows(), layer.output);
      team_.share(static_cast<int>(pieces_.size()) * splits_ * shape_.kv_heads, 1,
                  [&](int task, int) { attend_task(member, number, task, mixed); });
      add_product(layer.output, mixed, layer.output_bias);

      x = normalised(member, rows(), nullptr, layer.feed_forward_norm, layer.gate_up);
      Activations inner = inner_.shaped(rows(), layer.down);
      team_.share(inner.groups, grain(inner.groups, kGroupTiles), [&](int first, int last) {
        multiply(layer.gate_up, first * kGroupTiles, last * kGroupTiles, x, rows(), [&](int row, float* both) {
          for (int group = first; group < last; ++group, both += 2 * kGroup) inner.put_group(row, group, gated(both));
        });
      });
      add_product(layer.down, inner, nullptr);
    }
    if (wanted_.empty()) return;
    const Matrix& head = model_.head;
    Activations x = normalised(member, wanted(), wanted_.data(), model_.norm, head);
    team_.share(head.tiles, grain(head.tiles), [&](int first, int last) {
      const int from = first * kTileRows, count = std::min(last * kTileRows, shape_.vocab) - from;
      multiply(head, first, last, x, wanted(), [&](int row, const float* logits) {
        std::copy_n(logits, count, batch_.logits + static_cast<size_t>(row) * shape_.vocab + from);
      });
    });
  }

 private:
  int rows() const { return static_cast<int>(rows_.size()); }
  int wanted() const { return static_cast<int>(wanted_.size()); }
  int threads() const { return static_cast<int>(batch_.threads); }

  // The batch as flat rows, and which of them attend together.
  void take_rows() {
    const int64_t *token = batch_.tokens, *blocks = batch_.blocks;
    const int most = kQueries / shape_.group_size();  // rows in a piece
    int longest = 0;
    for (int64_t i = 0; i < batch_.slices; ++i) {
      const int start = static_cast<int>(batch_.starts[i]), end = start + static_cast<int>(batch_.counts[i]);
      for (int position = start; position < end; ++position, ++token) {
        if ((position - start) % most == 0) {
          const int count = std::min(end - position, most), last = (position + count - 1) / kBlockTokens + 1;
          pieces_.push_back({rows(), count, shape_.first_key(position) / kBlockTokens, last});
          longest = std::max(longest, last - pieces_.back().first_block);
        }
        if (position >= end - batch_.logit_counts[i]) wanted_.push_back(rows());
        rows_.push_back({static_cast<int>(*token), position, blocks});
      }
      blocks += batch_.table_sizes[i];
    }
    finished_ = std::vector<std::atomic<int>>(pieces_.size());
    // Contexts are split only where there are too few pieces to keep the whole team busy: all of it, however many work on
    // this step, so that their number does not change the result; and into at least four blocks each.
    const int tasks = static_cast<int>(pieces_.size()) * shape_.kv_heads;
    splits_ = std::min((longest + 3) / 4, (4 * team_.threads() + tasks - 1) / tasks);
  }

  // For the activations of all rows, whatever weights they meet; and for a block of each member's own.
  Activations room(Workspace& space, int columns, size_t members = 0) const {
    const int groups = round_up(columns, kGroup) / kGroup;
    const size_t blocks = std::max((rows_.size() + Activations::kSlots - 1) / Activations::kSlots, members);
    const size_t slots = blocks * groups * Activations::kSlots;
    return {space.take<uint8_t>(slots * kGroup * sizeof(uint16_t)), space.take<float>(slots * 2), groups};
  }

  // How many items of some tiles a member takes at a time: few enough to end together, and, where many rows pass over
  // them, to stay in the nearest cache.
  int grain(int items, int tiles = 1) const {
    const int most = rows() > Activations::kSlots ? 4 : kTilesAtOnce;
    return std::clamp(items / (8 * threads()), 1, most / tiles);
  }

  float* residual_row(int row) const { return residual_ + static_cast<size_t>(row) * hidden_; }
  uint16_t* query(int row, int head) const {
    return queries_ + (static_cast<size_t>(row) * shape_.heads + head) * shape_.whole_dim();
  }
  float* cosines(int row) const { return angles_ + static_cast<size_t>(row) * shape_.head_dim; }

  void begin_row(int row) {
    unpack_row(model_.embedding, rows_[row].token, residual_row(row));
    const int half = shape_.head_dim / 2;
    float* cosine = cosines(row);
    for (int i = 0; i < half; ++i) {
      const float angle = static_cast<float>(rows_[row].position) * model_.frequencies[i];
      cosine[i] = std::cos(angle);
      cosine[half + i] = std::sin(angle);
    }
  }

  // Rows of the residual stream, normalised, as activations for `weights`. `chosen`: which rows; null: all.
  Activations normalised(int member, int rows, const int* chosen, const float* norm, const Matrix& weights) {
    float* buffer = member_rows_ + static_cast<size_t>(member) * row_floats_;
    const auto put = [&](const Activations& to, int row) {
      normalise(residual_row(chosen ? chosen[row] : row), norm, buffer);
      to.put(row, buffer);
    };
    if (rows <= kOwnRows) {
      Activations own = input_.shaped(rows, weights, member);
      for (int row = 0; row < rows; ++row) put(own, row);
      return own;
    }
    Activations all_rows = input_.shaped(rows, weights);
    team_.share(rows, 1, [&](int first, int last) {
      for (int row = first; row < last; ++row) put(all_rows, row);
    });
    return all_rows;
  }

  void normalise(const float* x, const float* norm, float* out) const {
    Floats squares{};
    for (int i = 0; i < hidden_; i += kWidth) squares += load(x + i) * load(x + i);  // padding is zero
    const float factor = 1 / std::sqrt(sum(squares) / static_cast<float>(shape_.hidden) + shape_.eps);
    for (int i = 0; i < hidden_; i += kWidth) write(out + i, load(x + i) * factor * load(norm + i));
  }

  void add_product(const Matrix& weights, const Activations& x, const float* bias) {
    team_.share(weights.tiles, grain(weights.tiles), [&](int first, int last) {
      multiply(weights, first, last, x, rows(), [&](int row, const float* out) {
        float* to = residual_row(row);
        for (int i = first * kTileRows; i < last * kTileRows; i += kWidth, out += kWidth)
          write(to + i, load(to + i) + (bias ? load(out) + load(bias + i) : load(out)));
      });
    });
  }

  // silu(gate) * up for a group of columns, in place (Shazeer 2020, arXiv 2002.05202).
  static const float* gated(float* both) {
    for (int i = 0; i < kGroup; i += kWidth) {
      const float* tiles = both + i + i / kTileRows * kTileRows;  // a tile of the gate, then one of the up projection
      const Floats gate = load(tiles), up = load(tiles + kTileRows);
      write(both + i, gate / (1 + exponential(-gate)) * up);
    }
    return both;
  }

  // Takes a head of a row as the product made it: a query is kept for attention, a key or a value goes into the cache.
  void file(int number, int row, int head, float* x) const {
    const Layer& layer = model_.layers[number];
    const int dim = shape_.head_dim, key_head = head - shape_.heads, value_head = key_head - shape_.kv_heads;
    if (layer.qkv_bias)
      for (int i = 0; i < dim; ++i) x[i] += layer.qkv_bias[head * dim + i];
    if (key_head < 0)
      rotate(x, row, layer.query_norm, 1 / std::sqrt(static_cast<float>(dim)));
    else if (value_head < 0)
      rotate(x, row, layer.key_norm, 1);
    alignas(64) uint16_t halves[kMaxHeadDim];
    uint16_t* rounded = key_head < 0 ? query(row, head) : halves;
    for (int i = 0; i < dim; i += kWidth) store_bf16(rounded + i, load(x + i));
    if (key_head < 0) return;
    const int position = rows_[row].position, token = position % kBlockTokens;
    const int block = rows_[row].blocks[position / kBlockTokens];
    if (value_head < 0) {
      uint16_t* keys = model_.keys(block, number, key_head) + 2 * token;
      for (int i = 0; i < dim; ++i) keys[i / 2 * 2 * kBlockTokens + i % 2] = halves[i];
    } else {
      uint16_t* values = model_.values(block, number, value_head) + token / 2 * 2 * shape_.whole_dim() + token % 2;
      for (int i = 0; i < dim; ++i) values[2 * i] = halves[i];
    }
  }

  // A head of queries or keys, normalised if the model does that, and rotated (Su et al. 2021, arXiv 2104.09864).
  void rotate(float* x, int row, const float* norm, float scale) const {
    const int dim = shape_.head_dim, half = dim / 2;
    if (norm) {
      float squares = 0;
      for (int i = 0; i < dim; ++i) squares += x[i] * x[i];
      const float factor = 1 / std::sqrt(squares / static_cast<float>(dim) + shape_.eps);
      for (int i = 0; i < dim; ++i) x[i] *= factor * norm[i];
    }
    const float *cosine = cosines(row), *sine = cosine + half;
    for (int i = 0; i < half; ++i) {
      const float a = x[i] * scale, b = x[half + i] * scale;
      x[i] = a * cosine[i] - b * sine[i];
      x[half + i] = b * cosine[i] + a * sine[i];
    }
  }

  // One key head's keys, or one of some parts of them, and all queries of a piece that share it.
  void attend_task(int member, int number, int task, const Activations& mixed) {
    const int head = task % shape_.kv_heads, split = task / shape_.kv_heads % splits_;
    const int piece_number = task / shape_.kv_heads / splits_;
    const Piece& piece = pieces_[piece_number];
    const int blocks = piece.last_block - piece.first_block, group = shape_.group_size();
    AttentionScratch& scratch = scratch_[member];
    for (int i = 0; i < piece.rows * group; ++i) {
      const int row = piece.row + i / group;
      std::copy_n(query(row, head * group + i % group), shape_.head_dim, scratch.queries[i]);
      scratch.position[i] = rows_[row].position;
    }
    const int queries = piece.rows * group;
    const size_t head_parts = static_cast<size_t>(queries) * size_, split_parts = shape_.kv_heads * head_parts;
    float* parts = parts_ + static_cast<size_t>(piece.row) * splits_ * shape_.heads * size_;
    attend(scratch, queries, model_, number, head, rows_[piece.row].blocks, piece.first_block + blocks * split / splits_,
           piece.first_block + blocks * (split + 1) / splits_, parts + split * split_parts + head * head_parts);

    std::atomic<int>& finished = finished_[piece_number];
    if (finished.fetch_add(1, std::memory_order_acq_rel) < splits_ * shape_.kv_heads - 1) return;
    finished.store(0, std::memory_order_relaxed);  // for the next layer
    float* buffer = member_rows_ + static_cast<size_t>(member) * row_floats_;
    for (int i = shape_.query_width(); i < row_floats_; ++i) buffer[i] = 0;
    for (int row = 0; row < piece.rows; ++row) {
      for (int head = 0; head < shape_.heads; ++head)
        merge(parts + head / group * head_parts + (row * group + head % group) * size_, splits_, split_parts,
              shape_.head_dim, buffer + head * shape_.head_dim);
      mixed.put(piece.row + row, buffer);
    }
  }

  const Model& model_;
  const Shape& shape_;
  const Batch& batch_;
  Team& team_;
  const int size_;  // of a part
  std::vector<Row> rows_;
  std::vector<int> wanted_;  // rows that need logits
  std::vector<Piece> pieces_;
  std::vector<std::atomic<int>> finished_;  // tasks of each piece
  int splits_;                              // of each piece's keys
  int hidden_, row_floats_;                 // widths with padding
  float *residual_, *angles_, *parts_, *member_rows_;
  uint16_t* queries_;  // [row][head][whole_dim], rotated and scaled
  Activations input_, mixed_, inner_;
  AttentionScratch* scratch_;
};

}  // namespace

void forward(const Model& model, const Batch& batch, Workspace& space, Team& team) {
  Forward pass(model, batch, space, team);
  for (const int64_t* pair = batch.copied; pair != batch.copied + 2 * batch.copies; pair += 2)
    std::memmove(model.keys(pair[1], 0, 0), model.keys(pair[0], 0, 0), model.shape.block_bytes());
  // A block that a slice begins and does not fill still holds a former sequence's rows behind the new ones. They are
  // masked, but a masked value enters sums times zero, and zero times infinity is not a number.
  const int64_t* blocks = batch.blocks;
  for (int64_t i = 0; i < batch.slices; blocks += batch.table_sizes[i++]) {
    const int64_t end = batch.starts[i] + batch.counts[i], begun = end / kBlockTokens;
    if (end % kBlockTokens && begun * kBlockTokens >= batch.starts[i])
      std::memset(model.keys(blocks[begun], 0, 0), 0, model.shape.block_bytes());
  }
  team.run(static_cast<int>(batch.threads), [&](int member) { pass.run(member); });
}

}  // namespace tie
