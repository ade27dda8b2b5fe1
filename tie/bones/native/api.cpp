// The library's border: C functions that Python calls through ctypes. Nothing that comes in is believed.
//
// Memory that is handed in (weights, cache) must outlive the engine. One call at a time on an engine. Functions return
// null, or what is wrong: then nothing was changed.
#include <algorithm>
#include <system_error>

#include "forward.h"
#include "simd.h"

#define TIE_EXPORT extern "C" __attribute__((visibility("default")))

namespace tie {

using Problem = const char*;

constexpr Problem kNone = nullptr;
constexpr Problem kMissing = "an argument is missing";
constexpr Problem kBadThreads = "the number of threads is impossible";
constexpr Problem kNoMemory = "there is not enough memory";
constexpr Problem kBadWeights = "the weights have another size, format or alignment than the model needs";
constexpr Problem kBadTotals = "the lengths of the batch do not add up";
constexpr Problem kBadBlock = "a block is outside the pool";

enum Role : int32_t {  // as in executor.py
  kEmbedding, kHead, kQkv, kOutput, kGateUp, kDown,  // matrices, and vectors from here on
  kFrequencies, kNorm, kAttentionNorm, kFeedForwardNorm, kQkvBias, kOutputBias, kQueryNorm, kKeyNorm
};

constexpr int64_t kMostRows = 1 << 20;
constexpr int kMostThreads = 1024;

// A batch as it comes in. Filled in Python, field by field: see library.py.
struct Batch {
  const int64_t *counts, *starts, *table_sizes, *logit_counts;  // [slices], as in Slice; logits of the last rows
  const int64_t *tokens, *blocks;  // [rows], [table_blocks]: the slices' tokens and tables, one after another
  const int64_t* copied;           // [copies][2]
  float* logits;                   // [wanted][vocab]
  int64_t slices, rows, table_blocks, copies, wanted, threads;
};

struct Engine {
  Model model;
  Workspace space;
  Team team;

  Engine(const Shape& shape, int threads, int spins) : team(threads, spins) {
    model.shape = shape;
    model.layers.resize(shape.layers);
  }

  bool complete() const {
    const Shape& s = model.shape;
    bool all = model.cache && model.embedding.data && model.head.data && model.norm && model.frequencies;
    for (const Layer& l : model.layers)
      all = all && l.qkv.data && l.output.data && l.gate_up.data && l.down.data && l.attention_norm &&
            l.feed_forward_norm && (!s.qk_norm || (l.query_norm && l.key_norm));
    return all;
  }

  Problem check(const Batch& batch) const;
  Problem lay_out(const Batch& batch, Step& step);
};

Problem Engine::check(const Batch& batch) const {
  const int64_t context = model.shape.context;
  if (batch.slices < 1) return "the batch is empty";
  if (batch.threads < 1 || batch.threads > team.threads()) return kBadThreads;
  if (batch.slices > kMostRows || batch.rows > kMostRows || batch.copies < 0 || batch.copies > kMostRows)
    return kBadTotals;
  int64_t rows = 0, table_blocks = 0, wanted = 0;
  for (int64_t i = 0; i < batch.slices; ++i) {
    const int64_t count = batch.counts[i], start = batch.starts[i], table = batch.table_sizes[i];
    if (count < 1) return "a slice has no tokens";
    // No sum or product of what has passed so far overflows.
    if (count > batch.rows - rows || table < 0 || table > batch.table_blocks - table_blocks) return kBadTotals;
    if (start < 0 || start > context || count > context - start) return "a sequence is longer than the model's context";
    if (table > kMostRows || table * kBlockTokens < start + count) return "a block table does not cover its sequence";
    if (batch.logit_counts[i] < 0 || batch.logit_counts[i] > count) return "more logits are asked than there are rows";
    rows += count;
    table_blocks += table;
    wanted += batch.logit_counts[i];
  }
  if (rows != batch.rows || table_blocks != batch.table_blocks || wanted != batch.wanted) return kBadTotals;
  for (int64_t i = 0; i < rows; ++i)
    if (batch.tokens[i] < 0 || batch.tokens[i] >= model.shape.vocab) return "a token is outside the vocabulary";
  for (int64_t i = 0; i < table_blocks; ++i)
    if (batch.blocks[i] < 0 || batch.blocks[i] >= model.blocks) return kBadBlock;
  for (int64_t i = 0; i < 2 * batch.copies; ++i)
    if (batch.copied[i] < 0 || batch.copied[i] >= model.blocks) return kBadBlock;
  return kNone;
}

// A checked batch as flat rows.
Problem Engine::lay_out(const Batch& batch, Step& step) {
  space.begin();
  auto* tokens = space.take<int32_t>(batch.rows);
  auto* positions = space.take<int32_t>(batch.rows);
  auto* owners = space.take<int32_t>(batch.rows);
  auto* wanted = space.take<int32_t>(batch.wanted);
  auto* table = space.take<int32_t>(batch.table_blocks);
  auto* slices = space.take<Slice>(batch.slices);
  bool* written = space.take<bool>(model.blocks);  // whether the batch writes it; all false between calls
  std::copy_n(batch.tokens, batch.rows, tokens);
  std::copy_n(batch.blocks, batch.table_blocks, table);
  step = {static_cast<int>(batch.rows), static_cast<int>(batch.slices), 0, tokens, positions, owners, slices, wanted,
          batch.logits, true, batch.copied, static_cast<int>(batch.copies), static_cast<int>(batch.threads)};

  bool twice = false;
  int row = 0;
  const auto for_written = [&](const Slice& slice, auto use) {
    for (int b = slice.start / kBlockTokens; b * kBlockTokens < slice.start + slice.count; ++b)
      use(written[slice.blocks[b]]);
  };
  for (int i = 0; i < step.slices; ++i) {
    slices[i] = {row, static_cast<int>(batch.counts[i]), static_cast<int>(batch.starts[i]), table};
    const Slice& slice = slices[i];
    table += batch.table_sizes[i];
    step.alone = step.alone && slice.count == 1;
    for (int k = 0; k < slice.count; ++k, ++row) {
      positions[row] = slice.start + k;
      owners[row] = i;
      if (k >= slice.count - batch.logit_counts[i]) wanted[step.wanted++] = row;
    }
    for_written(slice, [&](bool& mark) {
      twice = twice || mark;
      mark = true;
    });
  }
  for (int i = 0; i < step.slices; ++i)
    for (int b = 0; b < slices[i].start / kBlockTokens; ++b)
      step.alone = step.alone && !written[slices[i].blocks[b]];
  for (int i = 0; i < step.slices; ++i) for_written(slices[i], [](bool& mark) { mark = false; });
  return twice ? "a block is written twice in one batch" : kNone;
}

static bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; }

// Where a tensor belongs, and its size there. A vector has one row. Both null: nowhere.
struct Place {
  Matrix* matrix = nullptr;
  const float** vector = nullptr;
  int rows = 0, columns = 0;
};

static Place place(Engine& engine, int32_t role, int32_t layer) {
  const Shape& s = engine.model.shape;
  Model& m = engine.model;
  if (layer < 0 || layer >= s.layers) return {};
  if (layer && (role == kEmbedding || role == kHead || role == kFrequencies || role == kNorm)) return {};
  Layer& l = m.layers[layer];
  const int inner = round_up(s.intermediate, kGroup);
  switch (role) {
    case kEmbedding: return {&m.embedding, nullptr, s.vocab, s.hidden};
    case kHead: return {&m.head, nullptr, s.vocab, s.hidden};
    case kQkv: return {&l.qkv, nullptr, s.qkv_width(), s.hidden};
    case kOutput: return {&l.output, nullptr, s.hidden, s.query_width()};
    case kGateUp: return {&l.gate_up, nullptr, 2 * inner, s.hidden};
    case kDown: return {&l.down, nullptr, s.hidden, inner};
    case kFrequencies: return {nullptr, &m.frequencies, 1, s.head_dim / 2};
    case kNorm: return {nullptr, &m.norm, 1, s.hidden};
    case kAttentionNorm: return {nullptr, &l.attention_norm, 1, s.hidden};
    case kFeedForwardNorm: return {nullptr, &l.feed_forward_norm, 1, s.hidden};
    case kQkvBias: return {nullptr, &l.qkv_bias, 1, s.qkv_width()};
    case kOutputBias: return {nullptr, &l.output_bias, 1, s.hidden};
    case kQueryNorm: return {nullptr, s.qk_norm ? &l.query_norm : nullptr, 1, s.head_dim};
    case kKeyNorm: return {nullptr, s.qk_norm ? &l.key_norm : nullptr, 1, s.head_dim};
    default: return {};
  }
}

}  // namespace tie

using namespace tie;

// Counts changes of this border, so that a library left over from an older build is not called: see library.py.
TIE_EXPORT int32_t tie_native_border() { return 3; }

TIE_EXPORT const char* tie_native_level() { return kLevel; }

// Makes an engine for models of a shape. `spins`: how often a waiting thread looks before it sleeps.
TIE_EXPORT Problem tie_native_new(const Shape* shape, uint64_t shape_bytes, int32_t threads, int32_t spins,
                                  Engine** engine) try {
  if (!shape || !engine) return kMissing;
  if (shape_bytes != sizeof(Shape) || !shape->sound()) return "the model's shape is not one that this library can run";
  if (threads < 1 || threads > kMostThreads || spins < 0) return kBadThreads;
  *engine = new Engine(*shape, threads, spins);
  return kNone;
} catch (const std::bad_alloc&) {
  return kNoMemory;
} catch (const std::system_error&) {
  return "threads cannot be started";
}

TIE_EXPORT void tie_native_free(Engine* engine) { delete engine; }

// Bytes of a block of the KV pool.
TIE_EXPORT uint64_t tie_native_block_bytes(const Engine* engine) {
  return engine ? engine->model.shape.block_bytes() : 0;
}

// Says where a tensor lies: packed as model.h describes, on a cache line. `format` is of matrices.
TIE_EXPORT Problem tie_native_tensor(Engine* engine, int32_t role, int32_t layer, int32_t format, const void* data,
                                     uint64_t bytes) {
  if (!engine || !data) return kMissing;
  const Place to = place(*engine, role, layer);
  if (!to.matrix && !to.vector) return "there are no such weights in the model";
  if (format < 0 || format > static_cast<int32_t>(Format::kQ8) || !aligned(data)) return kBadWeights;
  Matrix matrix(static_cast<Format>(format), to.rows, to.columns);
  matrix.data = static_cast<const uint8_t*>(data);
  if (bytes != (to.matrix ? matrix.bytes() : matrix.columns * sizeof(float))) return kBadWeights;
  if (to.matrix)
    *to.matrix = matrix;
  else
    *to.vector = static_cast<const float*>(data);
  return kNone;
}

TIE_EXPORT Problem tie_native_cache(Engine* engine, void* data, uint64_t bytes, int32_t blocks) {
  if (!engine || !data) return kMissing;
  const uint64_t block = engine->model.shape.block_bytes();
  if (blocks < 1 || !aligned(data) || bytes % block || bytes / block != static_cast<uint64_t>(blocks)) return kBadBlock;
  engine->model.cache = static_cast<uint16_t*>(data);
  engine->model.blocks = blocks;
  return kNone;
}

TIE_EXPORT Problem tie_native_step(Engine* engine, const Batch* batch, uint64_t batch_bytes) try {
  if (!engine || !batch || batch_bytes != sizeof(Batch)) return kMissing;
  if (!batch->counts || !batch->starts || !batch->table_sizes || !batch->logit_counts || !batch->tokens ||
      !batch->blocks || (batch->copies && !batch->copied) || (batch->wanted && !batch->logits))
    return kMissing;
  if (!engine->complete()) return "weights or the KV pool are missing";
  if (const Problem problem = engine->check(*batch)) return problem;
  Step step;
  if (const Problem problem = engine->lay_out(*batch, step)) return problem;
  forward(engine->model, step, engine->space, engine->team);
  return kNone;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
