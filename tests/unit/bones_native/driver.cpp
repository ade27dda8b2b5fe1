// Random models, batches and lies against the native library's border, for builds with sanitizers.
//
// Weights are random bytes, so that scales are anything, infinite and not a number included. What is computed is checked
// elsewhere; here nothing may be read or written beyond its place, overflow, or race.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "model.h"

using tie::Batch;
using tie::Format;
using tie::Matrix;
using tie::Shape;

namespace tie {
struct Engine;
}
using Problem = const char*;
struct RawTensor {  // as in api.cpp
  const void* data;
  uint64_t bytes;
  int64_t format;
};
extern "C" {
uint64_t tie_native_block_bytes(const Shape*, uint64_t);
Problem tie_native_new(const Shape*, uint64_t, const RawTensor*, uint64_t, void*, uint64_t, int32_t, int32_t, tie::Engine**);
void tie_native_free(tie::Engine*);
Problem tie_native_step(tie::Engine*, const Batch*, uint64_t);
}

namespace {

std::mt19937_64 generator(1);

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "driver: %s\n", what);
  std::exit(1);
}

// Memory of exactly the wanted size: what is read beyond it is noticed.
using Memory = std::unique_ptr<uint8_t, decltype(&std::free)>;
Memory memory(size_t bytes, bool random) {
  void* data = nullptr;
  require(posix_memalign(&data, 64, bytes) == 0, "no memory");
  for (size_t i = 0; i < bytes; ++i) static_cast<uint8_t*>(data)[i] = random ? static_cast<uint8_t>(generator()) : 0;
  return {static_cast<uint8_t*>(data), &std::free};
}

struct Subject {
  Shape shape;
  int blocks, threads;
  std::vector<Memory> kept;
  tie::Engine* engine = nullptr;

  ~Subject() { tie_native_free(engine); }

  std::vector<RawTensor> tensors;

  void matrix(int rows, int columns) {
    const int format = static_cast<int>(between(0, 2));
    const size_t bytes = Matrix(static_cast<Format>(format), rows, columns).bytes();
    kept.push_back(memory(bytes, true));
    tensors.push_back({kept.back().get(), bytes, format});
  }
  void vector(int count) {
    const size_t bytes = static_cast<size_t>(tie::round_up(count, tie::kGroup)) * 4;
    kept.push_back(memory(bytes, false));
    float* values = reinterpret_cast<float*>(kept.back().get());
    for (int i = 0; i < count; ++i) values[i] = static_cast<float>(between(-100, 100)) / 100;
    tensors.push_back({values, bytes, 0});
  }
  void perhaps_vector(int count) {
    if (between(0, 1))
      vector(count);
    else
      tensors.push_back({});
  }

  Problem start(size_t count, size_t cache_bytes, int spins) {
    return tie_native_new(&shape, sizeof shape, tensors.data(), count, kept.back().get(), cache_bytes, threads, spins,
                          &engine);
  }

  // Makes the engine; and none where a tensor or the cache is not what it should be.
  void start() {
    const size_t cache_bytes = blocks * tie_native_block_bytes(&shape, sizeof shape);
    kept.push_back(memory(cache_bytes, true));
    const int spins = static_cast<int>(between(0, 200));
    RawTensor& any = tensors[static_cast<size_t>(between(0, static_cast<int64_t>(tensors.size()) - 1))];
    const RawTensor right = any;
    any.bytes = right.data ? right.bytes - 64 : 64;
    any.data = right.data ? right.data : tensors[0].data;
    require(start(tensors.size(), cache_bytes, spins) != nullptr, "a tensor of another size was taken");
    any = right;
    require(start(tensors.size() - 1, cache_bytes, spins) != nullptr, "a model without its last tensor was taken");
    require(start(tensors.size(), cache_bytes - 2, spins) != nullptr, "a short cache was taken");
    require(start(tensors.size(), cache_bytes, spins) == nullptr, "a model was refused");
  }
};

void make(Subject& s) {
  const int kv_heads = static_cast<int>(between(1, 3));
  s.shape = {static_cast<int>(between(1, 90)), static_cast<int>(between(1, 90)), 2,
             kv_heads * static_cast<int>(between(1, 5)), kv_heads, 2 * static_cast<int>(between(1, 40)),
             static_cast<int>(between(1, 60)), 200, static_cast<int>(between(0, 1) * between(1, 100)),
             1e-5f};
  s.blocks = static_cast<int>(between(1, 40));
  const Shape& shape = s.shape;
  s.threads = static_cast<int>(between(1, 3));
  const int inner = tie::round_up(shape.intermediate, tie::kGroup);
  s.matrix(shape.vocab, shape.hidden);
  s.matrix(shape.vocab, shape.hidden);
  s.vector(shape.hidden);
  s.vector(shape.head_dim / 2);
  for (int layer = 0; layer < shape.layers; ++layer) {
    s.vector(shape.hidden);
    s.matrix(shape.all_heads() * shape.whole_dim(), shape.hidden);
    s.perhaps_vector(shape.all_heads() * shape.head_dim);
    s.perhaps_vector(shape.head_dim);
    s.perhaps_vector(shape.head_dim);
    s.matrix(shape.hidden, shape.query_width());
    s.perhaps_vector(shape.hidden);
    s.vector(shape.hidden);
    s.matrix(2 * inner, shape.hidden);
    s.matrix(shape.hidden, inner);
  }
  s.start();
}

// A batch that is mostly sound; `lies` chances in a hundred that any number is not. Whether it was carried out.
bool step(Subject& s, int lies) {
  const auto maybe = [&](int64_t value) {
    if (between(0, 99) >= lies) return value;
    const int64_t wild[] = {-1, 0, value + 1, value - 1, INT64_MIN, INT64_MAX, int64_t{1} << 32, 1000000};
    return wild[between(0, 7)];
  };
  std::vector<int64_t> free_blocks, counts, starts, sizes, logits, tokens, blocks, copied;
  for (int i = 0; i < s.blocks; ++i) free_blocks.push_back(i);
  std::shuffle(free_blocks.begin(), free_blocks.end(), generator);
  for (int64_t slices = between(1, 6); slices; --slices) {
    const int64_t start = between(0, 1) * between(0, 120), count = between(0, 2) ? 1 : between(1, 60);
    const size_t needed = static_cast<size_t>((start + count + 15) / 16);
    if (needed > free_blocks.size()) break;
    counts.push_back(maybe(count));
    starts.push_back(maybe(start));
    sizes.push_back(maybe(static_cast<int64_t>(needed)));
    logits.push_back(maybe(between(0, count)));
    for (int64_t i = 0; i < count; ++i) tokens.push_back(maybe(between(0, s.shape.vocab - 1)));
    for (size_t i = 0; i < needed; ++i, free_blocks.pop_back()) blocks.push_back(maybe(free_blocks.back()));
  }
  if (counts.empty()) return false;
  if (between(0, 3) == 0) copied = {maybe(between(0, s.blocks - 1)), maybe(between(0, s.blocks - 1))};
  int64_t wanted = 0;
  for (int64_t count : logits) wanted += count > 0 && count < 100 ? count : 0;
  std::vector<float> out(static_cast<size_t>(wanted) * s.shape.vocab);
  float none;
  const Batch batch{counts.data(), starts.data(), sizes.data(), logits.data(), tokens.data(), blocks.data(),
                       copied.data(), out.empty() ? &none : out.data(), static_cast<int64_t>(counts.size()),
                       static_cast<int64_t>(tokens.size()), static_cast<int64_t>(blocks.size()),
                       static_cast<int64_t>(copied.size() / 2), wanted, maybe(between(1, s.threads))};
  return tie_native_step(s.engine, &batch, sizeof batch) == nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const int models = argc > 1 ? std::atoi(argv[1]) : 50;
  int done = 0, refused = 0;
  for (int i = 0; i < models; ++i) {
    Subject subject;
    make(subject);
    for (int k = 0; k < 4; ++k) done += step(subject, 0);
    for (int k = 0; k < 8; ++k) refused += !step(subject, 5);
  }
  std::printf("%d steps, %d refusals\n", done, refused);
  require(done > models && refused > models, "too little was tried");
  return 0;
}
