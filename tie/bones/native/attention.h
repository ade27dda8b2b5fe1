// Attention of a few queries over the blocks of one sequence, for one key head.
//
// A piece of work has up to 32 queries: the heads that share the key head, of one row or several neighbouring ones. All
// of them meet each key while it is in the cache. Softmax runs along with the keys (Milakov and Gimelshein 2018, arXiv
// 1805.02867), so that a context may also be split among threads and merged afterwards (Dao et al. 2023,
// "Flash-Decoding").
#pragma once

#include <cmath>

#include "linear.h"

namespace tie {

constexpr int kQueries = 32;  // at most, in a piece of work
constexpr int kSpan = 128;    // keys between two corrections of the softmax
constexpr int kSpanBlocks = kSpan / kBlockTokens;
// So many queries meet so many vectors of keys, or of values: as many sums as there are registers for, and enough, even
// of few queries, that no sum waits for itself.
constexpr int kQueriesAtOnce = 4, kVectorsAtOnce = kRegisters / 8;
constexpr int kAhead = 4;         // blocks
constexpr float kNever = -1e30f;  // the score of a key that a query does not see: finite, so that no 0 * infinity arises

// A query's result over some keys: [0] the largest score, [1] the sum of weights, [2...] the weighted sum of values.
constexpr int kPartHeader = 16;   // keeps the values aligned
inline int part_size(const Shape& shape) { return kPartHeader + shape.whole_dim(); }

struct AttentionScratch {
  alignas(64) uint16_t queries[kQueries][kMaxHeadDim];
  alignas(64) float scores[kQueries][kSpan];
  alignas(64) uint16_t weights[kQueries][kSpan];
  alignas(64) float rescale[kQueries];
  int position[kQueries];  // of the query's token: the last key that it sees
};

// Scores of N queries against V vectors of keys. `first`, `column`: where the first key stands, in its sequence and in
// the span.
template <int N, int V>
TIE_INLINE void score(AttentionScratch& s, int query, const uint16_t* const (&keys)[V], const Shape& shape,
                      int first, int column) {
  Floats sums[N][V] = {};
  for (int pair = 0; pair < shape.head_dim / 2; ++pair)
    for (int v = 0; v < V; ++v) {
      const Words k = read<Words>(keys[v] + pair * 2 * kBlockTokens);
      for (int n = 0; n < N; ++n) sums[n][v] = dot_pairs(sums[n][v], k, all_words(&s.queries[query + n][2 * pair]));
    }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) {
      const int position = s.position[query + n], here = first + v * kWidth;
      const int from = shape.first_key(position) - here, to = position - here;
      if (from > 0 || to < kWidth - 1) sums[n][v] = keep(sums[n][v], from, to, kNever);
      write(&s.scores[query + n][column + v * kWidth], sums[n][v]);
    }
}

// Turns scores of `keys` keys into weights relative to the largest so far, and keeps sums in the query's part.
TIE_INLINE void soften(AttentionScratch& s, int query, int keys, float* part) {
  Floats most = all(part[0]), total{};
  for (int k = 0; k < keys; k += kWidth) most = larger(most, load(&s.scores[query][k]));
  const float limit = largest(most);
  for (int k = 0; k < keys; k += kWidth) {
    const Floats weight = exponential(load(&s.scores[query][k]) - limit);
    total += weight;
    store_bf16(&s.weights[query][k], weight);
  }
  s.rescale[query] = std::exp(part[0] - limit);
  part[0] = limit;
  part[1] = part[1] * s.rescale[query] + sum(total);
}

// Adds the weighted values of a span to N queries' parts, for V vectors of dimensions.
template <int N, int V>
TIE_INLINE void add_values(const AttentionScratch& s, int query, const Model& model, int layer, int head,
                           const int64_t* blocks, int count, int dim, float* parts, int size) {
  parts += kPartHeader + dim;
  Floats sums[N][V];
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) sums[n][v] = load(parts + n * size + v * kWidth) * s.rescale[query + n];
  for (int b = 0; b < count; ++b) {
    const uint16_t* values = model.values(blocks[b], layer, head) + 2 * dim;
    for (int pair = 0; pair < kBlockTokens / 2; ++pair, values += 2 * model.shape.whole_dim())
      for (int v = 0; v < V; ++v) {
        const Words two = read<Words>(values + 2 * v * kWidth);
        for (int n = 0; n < N; ++n)
          sums[n][v] = dot_pairs(sums[n][v], two, all_words(&s.weights[query + n][b * kBlockTokens + 2 * pair]));
      }
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) write(parts + n * size + v * kWidth, sums[n][v]);
}

// Asks for what will be read soon: a sequence's blocks lie anywhere, where no hardware looks for them by itself.
TIE_INLINE void fetch(const uint16_t* values, size_t count) {
  for (size_t i = 0; i < count; i += 64 / sizeof *values) __builtin_prefetch(values + i, 0, 2);
}

// Calls use(count of queries, count of vectors, both as constants, first query, first vector) for all of them.
template <class Use>
TIE_INLINE void in_pieces(int queries, int vectors, Use use) {
  for (int vector = 0; vector < vectors; vector += kVectorsAtOnce)
    for (int query = 0; query < queries; query += kQueriesAtOnce)
      with_constant<kQueriesAtOnce>(std::min(queries - query, kQueriesAtOnce), [&](auto n) {
        with_constant<kVectorsAtOnce>(std::min(vectors - vector, kVectorsAtOnce),
                                      [&](auto v) { use(n, v, query, vector); });
      });
}

// Blocks first..last of a sequence's table. s.queries and s.position are set for `queries` queries, whose parts lie one
// after another.
inline void attend(AttentionScratch& s, int queries, const Model& model, int layer, int head, const int64_t* blocks,
                   int first, int last, float* parts) {
  const Shape& shape = model.shape;
  const int size = part_size(shape);
  for (int query = 0; query < queries; ++query) {
    std::fill_n(parts + query * size, size, 0.0f);
    parts[query * size] = kNever;
  }
  for (int from = first; from < last; from += kSpanBlocks) {
    const int count = std::min(last - from, kSpanBlocks);
    in_pieces(queries, count * kBlockTokens / kWidth, [&](auto n, auto v, int query, int vector) {
      const uint16_t* keys[v()];
      for (int i = 0; i < v(); ++i) {
        const int column = (vector + i) * kWidth, token = column % kBlockTokens, block = from + column / kBlockTokens;
        keys[i] = model.keys(blocks[block], layer, head) + 2 * token;
        if (query || token) continue;
        fetch(model.values(blocks[block], layer, head), shape.value_values());
        if (block + kAhead < last) fetch(model.keys(blocks[block + kAhead], layer, head), shape.key_values());
      }
      score<n(), v()>(s, query, keys, shape, from * kBlockTokens + vector * kWidth, vector * kWidth);
    });
    for (int query = 0; query < queries; ++query) soften(s, query, count * kBlockTokens, parts + query * size);
    in_pieces(queries, shape.whole_dim() / kWidth, [&](auto n, auto v, int query, int vector) {
      add_values<n(), v()>(s, query, model, layer, head, blocks + from, count, vector * kWidth, parts + query * size,
                           size);
    });
  }
}

// One query's result over all its keys, from the `count` parts that it was split into.
inline void merge(const float* parts, int count, size_t stride, int head_dim, float* out) {
  float most = kNever, total = 0;
  for (int i = 0; i < count; ++i) most = std::max(most, parts[i * stride]);
  std::fill_n(out, head_dim, 0.0f);
  for (int i = 0; i < count; ++i) {
    const float* part = parts + i * stride;
    const float weight = std::exp(part[0] - most);
    total += weight * part[1];
    for (int d = 0; d < head_dim; ++d) out[d] += weight * part[kPartHeader + d];
  }
  const float share = 1 / total;
  for (int d = 0; d < head_dim; ++d) out[d] *= share;
}

}  // namespace tie
