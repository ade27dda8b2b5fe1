// One forward step: rows of tokens in, keys and values into the cache, logits out.
//
// All members of the team run `Forward::run` side by side and meet after each phase:
//
//   embed, angles | per layer:  norm, QKV | (file keys and values) | attention | output, + | norm, gate-up | down, + |
//   norm, head
//
// A phase's result is made where the next phase wants it: attention's last task on some rows turns them into activations
// for the output projection, and gate-up into those for the down projection.
#include "forward.h"

#include <algorithm>

#include "attention.h"

namespace tie {
namespace {

// Rows of one slice that attend together, and the blocks that they see.
struct Piece {
  int slice, row, rows;
  int first_block, last_block;  // of the slice's table
  int splits;                   // among how many tasks, for each key head
  size_t part;                  // where its parts begin
};

struct AttentionTask {
  int piece, head, split;
};

constexpr int kOwnRows = 4;  // up to so many rows, every member normalises all of them for itself: cheaper than to meet

class Forward {
 public:
  Forward(const Model& model, const Step& step, Workspace& space, Team& team)
      : model_(model), shape_(model.shape), step_(step), team_(team), size_(part_size(shape_)) {
    hidden_ = round_up(shape_.hidden, kGroup);
    qkv_ = round_up(shape_.qkv_width(), kTileRows);
    row_floats_ = round_up(std::max(shape_.hidden, shape_.query_width()), kGroup);
    const size_t rows = step.rows, members = step.threads;
    residual_ = space.take<float>(rows * hidden_);
    qkv_rows_ = space.take<float>(rows * qkv_);
    angles_ = space.take<float>(rows * shape_.head_dim);
    member_rows_ = space.take<float>(members * row_floats_);
    scratch_ = space.take<AttentionScratch>(members);
    input_ = room(space, shape_.hidden, step.threads);
    mixed_ = room(space, shape_.query_width());
    inner_ = room(space, shape_.intermediate);
    plan_attention(space);
  }

  void run(int member) {
    team_.share(step_.rows, 1, [&](int first, int last) {
      for (int row = first; row < last; ++row) begin_row(row);
    });
    for (int number = 0; number < shape_.layers; ++number) {
      const Layer& layer = model_.layers[number];
      Activations x = normalised(member, step_.rows, nullptr, layer.attention_norm, layer.qkv);
      team_.share(layer.qkv.tiles, grain(layer.qkv.tiles), [&](int first, int last) {
        multiply(layer.qkv, first, last, x, step_.rows, [&](int row, int tile, F out) {
          if (layer.qkv_bias) out = out + load(layer.qkv_bias + tile * kTileRows);
          store(qkv_row(row) + tile * kTileRows, out);
        });
      });
      if (!step_.alone) {
        team_.share(step_.rows, 1, [&](int first, int last) {
          for (int row = first; row < last; ++row)
            for (int head = 0; head < shape_.kv_heads; ++head) file(number, row, head);
        });
      }
      Activations mixed = mixed_.shaped(step_.rows, layer.output);
      team_.share(task_count_, 1, [&](int first, int last) {
        for (int task = first; task < last; ++task) attend_task(member, number, tasks_[task], mixed);
      });
      add_product(layer.output, mixed, layer.output_bias);

      x = normalised(member, step_.rows, nullptr, layer.feed_forward_norm, layer.gate_up);
      Activations inner = inner_.shaped(step_.rows, layer.down);
      team_.share(inner.groups, grain(inner.groups), [&](int first, int last) {
        multiply_gated(layer.gate_up, first, last, x, step_.rows, inner);
      });
      add_product(layer.down, inner, nullptr);
    }
    if (step_.wanted == 0) return;
    const Matrix& head = model_.head;
    Activations x = normalised(member, step_.wanted, step_.wanted_rows, model_.norm, head);
    team_.share(head.tiles, grain(head.tiles), [&](int first, int last) {
      multiply(head, first, last, x, step_.wanted, [&](int row, int tile, F out) { put_logits(row, tile, out); });
    });
  }

 private:
  // For the activations of all rows, whatever weights they meet; and for a block of each member's own.
  Activations room(Workspace& space, int columns, int members = 0) const {
    const int groups = round_up(columns, kGroup) / kGroup;
    const size_t blocks = std::max(round_up(step_.rows, Activations::kSlots) / Activations::kSlots, members);
    const size_t slots = blocks * groups * Activations::kSlots;
    return {space.take<uint8_t>(slots * kGroup * sizeof(uint16_t)), space.take<float>(slots * 2), groups};
  }

  // How many items a member takes at a time: few enough to end together, and, where many rows pass over them, to stay
  // in the nearest cache.
  int grain(int items) const {
    return std::clamp(items / (8 * step_.threads), 1, step_.rows > Activations::kSlots ? 4 : 32);
  }

  float* residual_row(int row) const { return residual_ + static_cast<size_t>(row) * hidden_; }
  float* qkv_row(int row) const { return qkv_rows_ + static_cast<size_t>(row) * qkv_; }
  float* cosines(int row) const { return angles_ + static_cast<size_t>(row) * shape_.head_dim; }

  void begin_row(int row) {
    unpack_row(model_.embedding, step_.tokens[row], residual_row(row));
    const int half = shape_.head_dim / 2;
    float* cosine = cosines(row);
    for (int i = 0; i < half; ++i) {
      const float angle = static_cast<float>(step_.positions[row]) * model_.frequencies[i];
      cosine[i] = std::cos(angle);
      cosine[half + i] = std::sin(angle);
    }
  }

  // Rows of the residual stream, normalised, as activations for `weights`. `chosen`: which rows; null: all.
  Activations normalised(int member, int rows, const int32_t* chosen, const float* norm, const Matrix& weights) {
    float* buffer = member_rows_ + static_cast<size_t>(member) * row_floats_;
    const auto put = [&](const Activations& to, int row) {
      normalise(residual_row(chosen ? chosen[row] : row), norm, buffer);
      to.put_row(row, buffer);
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
    F squares = zero();
    for (int i = 0; i < hidden_; i += kLanes) squares = fma(load(x + i), load(x + i), squares);  // padding is zero
    const F factor = all(1 / std::sqrt(sum(squares) / static_cast<float>(shape_.hidden) + shape_.eps));
    for (int i = 0; i < hidden_; i += kLanes) store(out + i, load(x + i) * factor * load(norm + i));
  }

  void add_product(const Matrix& weights, const Activations& x, const float* bias) {
    team_.share(weights.tiles, grain(weights.tiles), [&](int first, int last) {
      multiply(weights, first, last, x, step_.rows, [&](int row, int tile, F out) {
        if (bias) out = out + load(bias + tile * kTileRows);
        float* to = residual_row(row) + tile * kTileRows;
        store(to, load(to) + out);
      });
    });
  }

  void put_logits(int row, int tile, F out) const {
    float* to = step_.logits + static_cast<size_t>(row) * shape_.vocab;
    const int first = tile * kTileRows;
    if (first + kTileRows <= shape_.vocab) return store(to + first, out);
    float last[kLanes];
    store(last, out);
    std::memcpy(to + first, last, (shape_.vocab - first) * sizeof(float));
  }

  // A head of queries or keys, normalised if the model does that, and rotated (Su et al. 2021, arXiv 2104.09864).
  void rotate(const float* in, int row, const float* norm, float* out) const {
    const int dim = shape_.head_dim, half = dim / 2;
    if (norm) {
      float squares = 0;
      for (int i = 0; i < dim; ++i) squares += in[i] * in[i];
      const float factor = 1 / std::sqrt(squares / static_cast<float>(dim) + shape_.eps);
      float normal[kMaxHeadDim];
      for (int i = 0; i < dim; ++i) normal[i] = in[i] * factor * norm[i];
      return rotate(normal, row, nullptr, out);
    }
    const float *cosine = cosines(row), *sine = cosine + half;
    for (int i = 0; i < half; ++i) {
      const float a = in[i], b = in[half + i];
      out[i] = a * cosine[i] - b * sine[i];
      out[half + i] = b * cosine[i] + a * sine[i];
    }
  }

  // Files one row's key and value of one head.
  void file(int number, int row, int head) const {
    const int dim = shape_.head_dim, position = step_.positions[row];
    const int block = step_.slice[step_.owners[row]].blocks[position / kBlockTokens], token = position % kBlockTokens;
    const float* key = qkv_row(row) + shape_.query_width() + head * dim;
    const float* value = key + shape_.kv_heads * dim;
    float rotated[kMaxHeadDim];
    rotate(key, row, model_.layers[number].key_norm, rotated);
    uint16_t* keys = model_.keys(block, number, head) + 2 * token;
    for (int i = 0; i < dim / 2; ++i, keys += 2 * kBlockTokens) {
      keys[0] = float_to_bf16(rotated[2 * i]);
      keys[1] = float_to_bf16(rotated[2 * i + 1]);
    }
    uint16_t* values = model_.values(block, number, head) + token / 2 * 2 * shape_.value_dim() + token % 2;
    for (int i = 0; i < dim; ++i) values[2 * i] = float_to_bf16(value[i]);
  }

  void plan_attention(Workspace& space) {
    const int group = shape_.group_size();
    const int most = kQueries / group;  // rows in a piece
    int count = 0;
    for (int i = 0; i < step_.slices; ++i) count += (step_.slice[i].count + most - 1) / most;
    pieces_ = space.take<Piece>(count);
    finished_ = space.take<std::atomic<int>>(count);
    // Split contexts only where there are too few pieces to keep the whole team busy: all of it, however many work on
    // this step, so that their number does not change the result.
    const int wish = (4 * team_.threads() + count * shape_.kv_heads - 1) / (count * shape_.kv_heads);
    int made = 0, tasks = 0;
    size_t parts = 0;
    for (int i = 0; i < step_.slices; ++i) {
      const Slice& slice = step_.slice[i];
      for (int row = 0; row < slice.count; row += most) {
        const int rows = std::min(slice.count - row, most);
        const int first = slice.start + row, end = first + rows;
        const int seen = shape_.window && first + 1 > shape_.window ? first + 1 - shape_.window : 0;
        Piece piece{i, slice.row + row, rows, seen / kBlockTokens, (end + kBlockTokens - 1) / kBlockTokens, 1, parts};
        piece.splits = std::min((piece.last_block - piece.first_block + 3) / 4, wish);  // of at least four blocks each
        parts += static_cast<size_t>(piece.splits) * shape_.heads * rows * size_;
        tasks += piece.splits * shape_.kv_heads;
        pieces_[made++] = piece;
      }
    }
    parts_ = space.take<float>(parts);
    tasks_ = space.take<AttentionTask>(tasks);
    for (int i = 0; i < count; ++i) {
      finished_[i].store(0, std::memory_order_relaxed);
      for (int split = 0; split < pieces_[i].splits; ++split)
        for (int head = 0; head < shape_.kv_heads; ++head) tasks_[task_count_++] = {i, head, split};
    }
  }

  void attend_task(int member, int number, const AttentionTask& task, const Activations& mixed) {
    const Piece& piece = pieces_[task.piece];
    const int blocks = piece.last_block - piece.first_block, group = shape_.group_size();
    const int first = piece.first_block + blocks * task.split / piece.splits;
    const int last = piece.first_block + blocks * (task.split + 1) / piece.splits;
    if (step_.alone && last == piece.last_block) file(number, piece.row, task.head);

    AttentionScratch& scratch = scratch_[member];
    const float scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
    for (int row = 0; row < piece.rows; ++row) {
      const int position = step_.positions[piece.row + row];
      for (int i = 0; i < group; ++i) {
        const int query = row * group + i;
        float rotated[kMaxHeadDim];
        rotate(qkv_row(piece.row + row) + (task.head * group + i) * shape_.head_dim, piece.row + row,
               model_.layers[number].query_norm, rotated);
        for (int d = 0; d < shape_.head_dim; ++d) scratch.queries[query][d] = float_to_bf16(rotated[d] * scale);
        scratch.last_key[query] = position;
        scratch.first_key[query] = shape_.window && position + 1 > shape_.window ? position + 1 - shape_.window : 0;
      }
    }
    const int queries = piece.rows * group;
    const size_t head_parts = static_cast<size_t>(queries) * size_, split_parts = shape_.kv_heads * head_parts;
    float* parts = parts_ + piece.part;
    attend(scratch, queries, model_, number, task.head, step_.slice[piece.slice].blocks, first, last,
           parts + task.split * split_parts + task.head * head_parts);

    const int tasks = piece.splits * shape_.kv_heads;
    if (finished_[task.piece].fetch_add(1, std::memory_order_acq_rel) < tasks - 1) return;
    finished_[task.piece].store(0, std::memory_order_relaxed);  // for the next layer
    float* buffer = member_rows_ + static_cast<size_t>(member) * row_floats_;
    for (int i = shape_.query_width(); i < row_floats_; ++i) buffer[i] = 0;
    for (int row = 0; row < piece.rows; ++row) {
      for (int head = 0; head < shape_.heads; ++head)
        merge(parts + head / group * head_parts + (row * group + head % group) * size_, piece.splits, split_parts,
              shape_.head_dim, buffer + head * shape_.head_dim);
      mixed.put_row(piece.row + row, buffer);
    }
  }

  const Model& model_;
  const Shape& shape_;
  const Step& step_;
  Team& team_;
  const int size_;  // of a part
  int hidden_, qkv_, row_floats_;  // widths with padding
  float *residual_, *qkv_rows_, *angles_, *parts_, *member_rows_;
  Activations input_, mixed_, inner_;
  AttentionScratch* scratch_;
  Piece* pieces_;
  AttentionTask* tasks_;
  std::atomic<int>* finished_;
  int task_count_ = 0;
};

void copy_blocks(const Model& model, const Step& step) {
  for (int i = 0; i < step.copies; ++i)
    std::memmove(model.keys(static_cast<int>(step.copied[2 * i + 1]), 0, 0),
                 model.keys(static_cast<int>(step.copied[2 * i]), 0, 0), model.shape.block_bytes());
}

// A block that a slice begins and does not fill still holds a former sequence's rows behind the new ones. They are
// masked, but a masked value enters sums times zero, and zero times infinity is not a number.
void clear_begun_blocks(const Model& model, const Step& step) {
  for (int i = 0; i < step.slices; ++i) {
    const Slice& slice = step.slice[i];
    const int end = slice.start + slice.count, begun = end / kBlockTokens;
    if (end % kBlockTokens && begun * kBlockTokens >= slice.start)
      std::memset(model.keys(slice.blocks[begun], 0, 0), 0, model.shape.block_bytes());
  }
}

}  // namespace

void forward(const Model& model, const Step& step, Workspace& space, Team& team) {
  Forward pass(model, step, space, team);
  copy_blocks(model, step);
  clear_begun_blocks(model, step);
  auto body = [&](int member) { pass.run(member); };
  team.run(step.threads, body);
}

}  // namespace tie
