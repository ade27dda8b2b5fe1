// The library's border: C functions that Python calls through ctypes. Nothing that comes in is believed.
//
// Memory that is handed in (weights, cache) must outlive the engine. One call at a time on an engine. Every function
// returns a status; one that is not kOk means that nothing was changed.
#include <cstring>
#include <memory>
#include <system_error>

#include "forward.h"
#include "simd.h"

#define TIE_EXPORT extern "C" __attribute__((visibility("default")))

namespace tie {
namespace {

enum Status : int32_t {  // in the order of kMessages
  kOk,
  kNullArgument,
  kBadShape,
  kBadThreads,
  kNoMemory,
  kNoThreads,
  kUnknownWeights,
  kBadWeights,
  kIncomplete,
  kEmptyBatch,
  kEmptySlice,
  kBadTotals,
  kBadToken,
  kTooLong,
  kNotCovered,
  kBadBlock,
  kTooManyLogits,
  kWrittenTwice,
  kStatusCount
};

constexpr const char* kMessages[kStatusCount] = {
    "",
    "an argument is missing",
    "the model's shape is not one that this library can run",
    "the number of threads is impossible",
    "there is not enough memory",
    "threads cannot be started",
    "there are no such weights in the model",
    "the weights have another size, format or alignment than the model needs",
    "weights or the KV pool are missing",
    "the batch is empty",
    "a slice has no tokens",
    "the lengths of the batch do not add up",
    "a token is outside the vocabulary",
    "a sequence is longer than the model's context",
    "a block table does not cover its sequence",
    "a block is outside the pool",
    "more logits are asked than there are rows",
    "a block is written twice in one batch",
};

enum MatrixRole : int32_t { kEmbedding, kHead, kQkv, kOutput, kGateUp, kDown };
enum VectorRole : int32_t {
  kFrequencies, kNorm, kAttentionNorm, kFeedForwardNorm, kQkvBias, kOutputBias, kQueryNorm, kKeyNorm
};

constexpr int64_t kMostRows = 1 << 20;
constexpr int kMostThreads = 1024;

}  // namespace

struct Engine {
  Model model;
  std::unique_ptr<Layer[]> layers;
  Workspace workspace;
  Team team;
  Buffer<int32_t> tokens, positions, owners, tables, wanted;
  Buffer<bool> written;
  Buffer<Slice> slices;

  Engine(const Shape& shape, int threads, int spins) : layers(new Layer[shape.layers]), team(threads, spins) {
    model.shape = shape;
    model.layers = layers.get();
  }

  bool complete() const {
    const Shape& s = model.shape;
    if (!model.cache || !model.embedding.data || !model.head.data || !model.norm || !model.frequencies) return false;
    for (int i = 0; i < s.layers; ++i) {
      const Layer& l = layers[i];
      if (!l.qkv.data || !l.output.data || !l.gate_up.data || !l.down.data) return false;
      if (!l.attention_norm || !l.feed_forward_norm) return false;
      if (s.qk_norm && !(l.query_norm && l.key_norm)) return false;
    }
    return true;
  }
};

namespace {

// A batch as it comes in: of each slice the count of tokens, the start, the size of its table, the logits wanted; then
// all tokens and all tables, one after another; and pairs of blocks, of which the first is copied to the second.
struct Batch {
  const int64_t *counts, *starts, *table_sizes, *logits, *tokens, *blocks, *copied;
  int64_t slices, rows, table_blocks, wanted, copies;
};

Status check(const Model& model, const Batch& batch) {
  if (batch.slices < 1) return kEmptyBatch;
  if (batch.slices > kMostRows || batch.rows > kMostRows || batch.copies < 0 || batch.copies > kMostRows)
    return kBadTotals;
  int64_t rows = 0, table_blocks = 0, wanted = 0;
  for (int64_t i = 0; i < batch.slices; ++i) {
    const int64_t count = batch.counts[i], start = batch.starts[i], table = batch.table_sizes[i];
    if (count < 1) return kEmptySlice;
    if (count > batch.rows - rows || table < 0 || table > batch.table_blocks - table_blocks) return kBadTotals;
    if (start < 0 || start > model.shape.context || count > model.shape.context - start) return kTooLong;
    if (table > kMostRows || table * kBlockTokens < start + count) return kNotCovered;
    if (batch.logits[i] < 0 || batch.logits[i] > count) return kTooManyLogits;
    rows += count;
    table_blocks += table;
    wanted += batch.logits[i];
  }
  if (rows != batch.rows || table_blocks != batch.table_blocks || wanted != batch.wanted) return kBadTotals;
  for (int64_t i = 0; i < rows; ++i)
    if (batch.tokens[i] < 0 || batch.tokens[i] >= model.shape.vocab) return kBadToken;
  for (int64_t i = 0; i < table_blocks; ++i)
    if (batch.blocks[i] < 0 || batch.blocks[i] >= model.blocks) return kBadBlock;
  for (int64_t i = 0; i < 2 * batch.copies; ++i)
    if (batch.copied[i] < 0 || batch.copied[i] >= model.blocks) return kBadBlock;
  return kOk;
}

// Lays a checked batch out as flat rows. `written`: of each block of the pool, whether the batch writes it; all false
// before and after.
Status lay_out(Engine& engine, const Batch& batch, Step& step) {
  int32_t* tokens = engine.tokens.reserve(batch.rows);
  int32_t* positions = engine.positions.reserve(batch.rows);
  int32_t* owners = engine.owners.reserve(batch.rows);
  int32_t* tables = engine.tables.reserve(batch.table_blocks);
  int32_t* wanted = engine.wanted.reserve(batch.wanted);
  bool* written = engine.written.reserve(engine.model.blocks);
  Slice* slices = engine.slices.reserve(batch.slices);
  for (int64_t i = 0; i < batch.rows; ++i) tokens[i] = static_cast<int32_t>(batch.tokens[i]);
  for (int64_t i = 0; i < batch.table_blocks; ++i) tables[i] = static_cast<int32_t>(batch.blocks[i]);

  Status status = kOk;
  bool alone = true;
  int row = 0, rows_wanted = 0;
  const int32_t* table = tables;
  for (int i = 0; i < batch.slices; ++i) {
    Slice& slice = slices[i];
    slice = {row, static_cast<int>(batch.counts[i]), static_cast<int>(batch.starts[i]), table,
             static_cast<int>(batch.table_sizes[i])};
    table += slice.table_blocks;
    alone = alone && slice.count == 1;
    for (int k = 0; k < slice.count; ++k, ++row) {
      positions[row] = slice.start + k;
      owners[row] = i;
      if (k >= slice.count - batch.logits[i]) wanted[rows_wanted++] = row;
    }
    for (int b = slice.start / kBlockTokens; b * kBlockTokens < slice.start + slice.count; ++b) {
      if (written[slice.blocks[b]]) status = kWrittenTwice;
      written[slice.blocks[b]] = true;
    }
  }
  for (int i = 0; i < batch.slices; ++i)
    for (int b = 0; b < slices[i].start / kBlockTokens; ++b) alone = alone && !written[slices[i].blocks[b]];
  for (int i = 0; i < batch.slices; ++i)
    for (int b = slices[i].start / kBlockTokens; b * kBlockTokens < slices[i].start + slices[i].count; ++b)
      written[slices[i].blocks[b]] = false;
  step = {row, static_cast<int>(batch.slices), rows_wanted, tokens, positions, owners, slices, wanted, nullptr, alone, nullptr, 0};
  return status;
}

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; }

// Where a matrix belongs, with the dimensions that it must have; null: nowhere.
Matrix* place(Engine& engine, int32_t role, int32_t layer, int& rows, int& columns) {
  const Shape& s = engine.model.shape;
  const int inner = round_up(s.intermediate, kGroup);
  if (role == kEmbedding || role == kHead) {
    rows = s.vocab, columns = s.hidden;
    return layer == 0 ? role == kHead ? &engine.model.head : &engine.model.embedding : nullptr;
  }
  if (layer < 0 || layer >= s.layers) return nullptr;
  Layer& l = engine.layers[layer];
  switch (role) {
    case kQkv: rows = s.qkv_width(), columns = s.hidden; return &l.qkv;
    case kOutput: rows = s.hidden, columns = s.query_width(); return &l.output;
    case kGateUp: rows = 2 * inner, columns = s.hidden; return &l.gate_up;
    case kDown: rows = s.hidden, columns = inner; return &l.down;
    default: return nullptr;
  }
}

const float** place(Engine& engine, int32_t role, int32_t layer, int& count) {
  const Shape& s = engine.model.shape;
  if (layer < 0 || layer >= s.layers) return nullptr;
  Layer& l = engine.layers[layer];
  switch (role) {
    case kFrequencies: count = s.head_dim / 2; return layer == 0 ? &engine.model.frequencies : nullptr;
    case kNorm: count = s.hidden; return layer == 0 ? &engine.model.norm : nullptr;
    case kAttentionNorm: count = s.hidden; return &l.attention_norm;
    case kFeedForwardNorm: count = s.hidden; return &l.feed_forward_norm;
    case kQkvBias: count = s.qkv_width(); return &l.qkv_bias;
    case kOutputBias: count = s.hidden; return &l.output_bias;
    case kQueryNorm: count = s.head_dim; return s.qk_norm ? &l.query_norm : nullptr;
    case kKeyNorm: count = s.head_dim; return s.qk_norm ? &l.key_norm : nullptr;
    default: return nullptr;
  }
}

}  // namespace
}  // namespace tie

using namespace tie;

// Counts changes of this border, so that a library left over from an older build is not called: see library.py.
TIE_EXPORT int32_t tie_native_border() { return 1; }

TIE_EXPORT const char* tie_native_level() { return kLevel; }

TIE_EXPORT const char* tie_native_message(int32_t status) {
  return status >= 0 && status < kStatusCount ? kMessages[status] : "an unknown status";
}

// Makes an engine for models of a shape. `spins`: how often a waiting thread looks before it sleeps.
TIE_EXPORT int32_t tie_native_new(const Shape* shape, uint64_t shape_bytes, int32_t threads, int32_t spins,
                                  Engine** engine) try {
  if (!shape || !engine) return kNullArgument;
  if (shape_bytes != sizeof(Shape) || !shape->sound()) return kBadShape;
  if (threads < 1 || threads > kMostThreads || spins < 0) return kBadThreads;
  *engine = new Engine(*shape, threads, spins);
  return kOk;
} catch (const std::bad_alloc&) {
  return kNoMemory;
} catch (const std::system_error&) {
  return kNoThreads;
}

TIE_EXPORT void tie_native_free(Engine* engine) { delete engine; }

// Bytes of a block of the KV pool.
TIE_EXPORT uint64_t tie_native_block_bytes(const Engine* engine) {
  return engine ? engine->model.shape.block_bytes() : 0;
}

TIE_EXPORT int32_t tie_native_matrix(Engine* engine, int32_t role, int32_t layer, int32_t format, const void* data,
                                     uint64_t bytes) {
  if (!engine || !data) return kNullArgument;
  int rows = 0, columns = 0;
  Matrix* to = place(*engine, role, layer, rows, columns);
  if (!to) return kUnknownWeights;
  if (format < 0 || format > static_cast<int32_t>(Format::kQ8) || !aligned(data)) return kBadWeights;
  Matrix matrix(static_cast<Format>(format), rows, columns);
  if (bytes != matrix.bytes()) return kBadWeights;
  matrix.data = static_cast<const uint8_t*>(data);
  *to = matrix;
  return kOk;
}

TIE_EXPORT int32_t tie_native_vector(Engine* engine, int32_t role, int32_t layer, const void* data, uint64_t bytes) {
  if (!engine || !data) return kNullArgument;
  int count = 0;
  const float** to = place(*engine, role, layer, count);
  if (!to) return kUnknownWeights;
  if (bytes != round_up(count, kGroup) * sizeof(float) || !aligned(data)) return kBadWeights;
  *to = static_cast<const float*>(data);
  return kOk;
}

TIE_EXPORT int32_t tie_native_cache(Engine* engine, void* data, uint64_t bytes, int32_t blocks) {
  if (!engine || !data) return kNullArgument;
  if (blocks < 1 || !aligned(data) || bytes / engine->model.shape.block_bytes() != static_cast<uint64_t>(blocks) ||
      bytes % engine->model.shape.block_bytes())
    return kBadWeights;
  engine->model.cache = static_cast<uint16_t*>(data);
  engine->model.blocks = blocks;
  return kOk;
}

TIE_EXPORT int32_t tie_native_step(Engine* engine, int64_t slices, const int64_t* counts, const int64_t* starts,
                                   const int64_t* table_sizes, const int64_t* logit_counts, const int64_t* tokens,
                                   int64_t rows, const int64_t* blocks, int64_t table_blocks, const int64_t* copied,
                                   int64_t copies, float* logits, int64_t wanted) try {
  if (!engine || !counts || !starts || !table_sizes || !logit_counts || !tokens || !blocks ||
      (copies && !copied) || (wanted && !logits))
    return kNullArgument;
  if (!engine->complete()) return kIncomplete;
  const Batch batch{counts, starts, table_sizes, logit_counts, tokens, blocks, copied,
                    slices, rows,   table_blocks, wanted, copies};
  if (const Status status = check(engine->model, batch)) return status;
  Step step;
  if (const Status status = lay_out(*engine, batch, step)) return status;
  step.logits = logits;
  step.copied = copied;
  step.copies = static_cast<int>(copies);
  forward(engine->model, step, engine->workspace, engine->team);
  return kOk;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}
