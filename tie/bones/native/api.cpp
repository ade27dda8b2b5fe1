// The library's border: C functions that Python calls through ctypes. Nothing that comes in is believed.
//
// Memory that is handed in (weights, cache) must outlive the engine. One call at a time on an engine. Functions return
// null, or what is wrong: then nothing was changed.
#include <algorithm>
#include <system_error>
#include <utility>

#include "forward.h"

#define TIE_EXPORT extern "C" __attribute__((visibility("default")))

namespace tie {

using Problem = const char*;

constexpr Problem kMissing = "an argument is missing";
constexpr Problem kBadThreads = "the number of threads is impossible";
constexpr Problem kNoMemory = "there is not enough memory";
constexpr Problem kBadTotals = "the lengths of the batch do not add up";
constexpr Problem kBadBlock = "a block is outside the pool";

constexpr int64_t kMostRows = 1 << 18, kMostBlocks = 1 << 24;  // in a batch
constexpr int kMostThreads = 1024;

// Filled in Python, field by field, as Shape and Batch are: see library.py.
struct Tensor {
  const void* data;  // packed as model.h describes, on a cache line; null: the model has none
  uint64_t bytes;
  int64_t format;  // of a matrix
};

static bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; }

static bool within(const int64_t* numbers, int64_t count, int64_t bound) {
  return std::all_of(numbers, numbers + count, [&](int64_t number) { return 0 <= number && number < bound; });
}

// Takes one tensor after another, and remembers whether all were what the model needs.
class Tensors {
 public:
  Tensors(const Tensor* next, uint64_t count) : next_(next), end_(next + count) {}

  bool sound() const { return sound_ && next_ == end_; }

  void matrix(Matrix& to, int rows, int columns) {
    const Tensor from = take();
    to = Matrix(static_cast<Format>(from.format), rows, columns);
    to.data = static_cast<const uint8_t*>(from.data);
    sound_ = sound_ && to.data && within(&from.format, 1, kFormats) && from.bytes == to.bytes();
  }
  void vector(const float*& to, int count, bool optional = false) {
    const Tensor from = take();
    to = static_cast<const float*>(from.data);
    sound_ = sound_ && (to ? from.bytes == round_up(count, kGroup) * sizeof(float) : optional);
  }

 private:
  Tensor take() {
    const Tensor none{};
    const Tensor& from = next_ == end_ ? none : *next_++;
    sound_ = sound_ && aligned(from.data);
    return from;
  }

  const Tensor *next_, *end_;
  bool sound_ = true;
};

struct Engine {
  const Model model;
  Workspace space;
  Team team;
  uint64_t calls = 0;
  std::vector<uint64_t> written;  // in which call each block was, last

  Engine(Model&& whole, int threads, int spins)
      : model(std::move(whole)), team(threads, spins), written(model.blocks) {}

  Problem check(const Batch& batch);
};

// In the order of `TENSORS` and `LAYER_TENSORS` of executor.py.
static bool take_weights(Model& model, Tensors tensors) {
  const Shape& s = model.shape;
  const int inner = round_up(s.intermediate, kGroup);
  tensors.matrix(model.embedding, s.vocab, s.hidden);
  tensors.matrix(model.head, s.vocab, s.hidden);
  tensors.vector(model.norm, s.hidden);
  tensors.vector(model.frequencies, s.head_dim / 2);
  for (Layer& layer : model.layers) {
    tensors.vector(layer.attention_norm, s.hidden);
    tensors.matrix(layer.qkv, s.all_heads() * s.whole_dim(), s.hidden);
    tensors.vector(layer.qkv_bias, s.all_heads() * s.head_dim, true);
    tensors.vector(layer.query_norm, s.head_dim, true);
    tensors.vector(layer.key_norm, s.head_dim, true);
    tensors.matrix(layer.output, s.hidden, s.query_width());
    tensors.vector(layer.output_bias, s.hidden, true);
    tensors.vector(layer.feed_forward_norm, s.hidden);
    tensors.matrix(layer.gate_up, 2 * inner, s.hidden);
    tensors.matrix(layer.down, s.hidden, inner);
  }
  return tensors.sound();
}

Problem Engine::check(const Batch& batch) {
  const int64_t context = model.shape.context;
  if (batch.slices < 1) return "the batch is empty";
  if (batch.threads < 1 || batch.threads > team.threads()) return kBadThreads;
  if (batch.slices > kMostRows || !within(&batch.rows, 1, kMostRows) || !within(&batch.table_blocks, 1, kMostBlocks) ||
      !within(&batch.copies, 1, kMostRows))
    return kBadTotals;
  if (!within(batch.tokens, batch.rows, model.shape.vocab)) return "a token is outside the vocabulary";
  if (!within(batch.blocks, batch.table_blocks, model.blocks)) return kBadBlock;
  if (!within(batch.copied, 2 * batch.copies, model.blocks)) return kBadBlock;
  ++calls;
  int64_t rows = 0, table_blocks = 0, wanted = 0;
  for (int64_t i = 0; i < batch.slices; ++i) {
    const int64_t count = batch.counts[i], start = batch.starts[i], table = batch.table_sizes[i];
    // No sum or product of what has passed so far overflows.
    if (count < 1) return "a slice has no tokens";
    if (count > batch.rows - rows || table < 0 || table > batch.table_blocks - table_blocks) return kBadTotals;
    if (start < 0 || start > context || count > context - start) return "a sequence is longer than the model's context";
    if (table * kBlockTokens < start + count) return "a block table does not cover its sequence";
    if (!within(&batch.logit_counts[i], 1, count + 1)) return "more logits are asked than there are rows";
    for (int64_t b = start / kBlockTokens; b * kBlockTokens < start + count; ++b)
      if (std::exchange(written[batch.blocks[table_blocks + b]], calls) == calls)
        return "a block is written twice in one batch";
    rows += count;
    table_blocks += table;
    wanted += batch.logit_counts[i];
  }
  return rows == batch.rows && table_blocks == batch.table_blocks && wanted == batch.wanted ? nullptr : kBadTotals;
}

}  // namespace tie

using namespace tie;

// Counts changes of this border, so that a library left over from an older build is not called: see library.py.
TIE_EXPORT int32_t tie_native_border() { return 4; }

// Bytes of a block of the KV pool; 0: this library cannot run models of this shape.
TIE_EXPORT uint64_t tie_native_block_bytes(const Shape* shape, uint64_t shape_bytes) {
  return shape && shape_bytes == sizeof(Shape) && shape->sound() ? shape->block_bytes() : 0;
}

// Makes an engine. `spins`: how often a waiting thread looks before it sleeps.
TIE_EXPORT Problem tie_native_new(const Shape* shape, uint64_t shape_bytes, const Tensor* tensors, uint64_t count,
                                  void* cache, uint64_t cache_bytes, int32_t threads, int32_t spins,
                                  Engine** engine) try {
  if (!shape || !tensors || !cache || !engine) return kMissing;
  const uint64_t block = tie_native_block_bytes(shape, shape_bytes);
  if (!block) return "the model's shape is not one that this library can run";
  const uint64_t blocks = cache_bytes / block;
  if (!blocks || blocks > kMostBlocks || cache_bytes % block || !aligned(cache)) return kBadBlock;
  if (threads < 1 || threads > kMostThreads || spins < 0) return kBadThreads;
  Model model(*shape, static_cast<uint16_t*>(cache), static_cast<int>(blocks));
  if (!take_weights(model, {tensors, count}))
    return "the weights have another size, format or alignment than the model needs";
  *engine = new Engine(std::move(model), threads, spins);
  return nullptr;
} catch (const std::bad_alloc&) {
  return kNoMemory;
} catch (const std::system_error&) {
  return "threads cannot be started";
}

TIE_EXPORT void tie_native_free(Engine* engine) { delete engine; }

TIE_EXPORT Problem tie_native_step(Engine* engine, const Batch* batch, uint64_t batch_bytes) try {
  if (!engine || !batch || batch_bytes != sizeof(Batch)) return kMissing;
  if (!batch->counts || !batch->starts || !batch->table_sizes || !batch->logit_counts || !batch->tokens ||
      !batch->blocks || (batch->copies && !batch->copied) || (batch->wanted && !batch->logits))
    return kMissing;
  if (const Problem problem = engine->check(*batch)) return problem;
  forward(engine->model, *batch, engine->space, engine->team);
  return nullptr;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
