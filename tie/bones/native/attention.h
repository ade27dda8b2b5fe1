// Attention of a few queries over the blocks of one sequence, for one key head.
//
// A piece of work has up to 32 queries: the heads that share the key head, of one row or several neighbouring ones. All
// of them meet each key while it is in the cache. Softmax runs along with the keys (Milakov and Gimelshein 2018, arXiv
// 1805.02867), so that a context may also be split among threads and merged afterwards (Dao et al. 2023,
// "Flash-Decoding").
#pragma once

#include "linear.h"

namespace tie {

constexpr int kQueries = 32;  // at most, in a piece of work
constexpr int kSpan = 128;    // keys between two corrections of the softmax
constexpr float kNever = -1e30f;  // the score of a key that a query does not see: finite, so that no 0 * infinity arises

// A query's result over some keys: [0] the largest score, [1] the sum of weights, [2...] the weighted sum of values.
constexpr int kPartHeader = kLanes;  // keeps the values aligned
constexpr int part_size(const Shape& shape) { return kPartHeader + round_up(shape.head_dim, kLanes); }

struct AttentionScratch {
  alignas(64) uint16_t queries[kQueries][kMaxHeadDim];
  alignas(64) float scores[kQueries][kSpan];
  alignas(64) uint16_t weights[kQueries][kSpan];
  alignas(64) float rescale[kQueries];
  int first_key[kQueries], last_key[kQueries];  // that a query sees
};

// Scores of N queries against one block of keys. `first` is the position of the block's first token.
template <int N>
TIE_INLINE void score_block(AttentionScratch& s, int query, const uint16_t* keys, int head_dim, int first, int column) {
  F sums[N];
  for (F& sum : sums) sum = zero();
  for (int pair = 0; pair < head_dim / 2; ++pair) {
    const Pairs k = pairs(keys + pair * 2 * kBlockTokens);
    for (int n = 0; n < N; ++n) sums[n] = dot_pairs(sums[n], k, &s.queries[query + n][2 * pair]);
  }
  for (int n = 0; n < N; ++n) {
    float* scores = &s.scores[query + n][column];
    store(scores, sums[n]);
    const int from = s.first_key[query + n] - first, to = s.last_key[query + n] - first;
    if (from > 0 || to < kBlockTokens - 1)
      for (int i = 0; i < kBlockTokens; ++i) scores[i] = i < from || i > to ? kNever : scores[i];
  }
}

// Turns scores of `keys` keys into weights relative to the largest so far, and keeps sums in the query's part.
TIE_INLINE void soften(AttentionScratch& s, int query, int keys, float* part) {
  F most = all(part[0]);
  for (int k = 0; k < keys; k += kLanes) most = larger(most, load(&s.scores[query][k]));
  const float limit = largest(most);
  const float rescale = std::exp(part[0] - limit);
  F total = zero();
  for (int k = 0; k < keys; k += kLanes) {
    const F weight = exponential(load(&s.scores[query][k]) - all(limit));
    total = total + weight;
    store_bf16(&s.weights[query][k], weight);
  }
  part[0] = limit;
  part[1] = part[1] * rescale + sum(total);
  s.rescale[query] = rescale;
}

// Adds the weighted values of a span to N queries' parts, for V vectors of 16 dimensions.
template <int N, int V>
TIE_INLINE void add_values(const AttentionScratch& s, int query, const Model& model, int layer, int head,
                           const int32_t* blocks, int count, int dim, float* parts, int size) {
  F sums[N][V];
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v)
      sums[n][v] = load(parts + n * size + kPartHeader + dim + v * kLanes) * all(s.rescale[query + n]);
  const int width = 2 * model.shape.value_dim();
  for (int b = 0; b < count; ++b) {
    const uint16_t* values = model.values(blocks[b], layer, head) + 2 * dim;
    for (int pair = 0; pair < kBlockTokens / 2; ++pair, values += width)
      for (int v = 0; v < V; ++v) {
        const Pairs two = pairs(values + 2 * v * kLanes);
        for (int n = 0; n < N; ++n)
          sums[n][v] = dot_pairs(sums[n][v], two, &s.weights[query + n][b * kBlockTokens + 2 * pair]);
      }
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) store(parts + n * size + kPartHeader + dim + v * kLanes, sums[n][v]);
}

// Blocks first..last of a sequence's table. s.queries, first_key and last_key are set for `queries` queries, whose parts
// lie one after another.
inline void attend(AttentionScratch& s, int queries, const Model& model, int layer, int head, const int32_t* blocks,
                   int first, int last, float* parts) {
  const Shape& shape = model.shape;
  const int size = part_size(shape);
  for (int query = 0; query < queries; ++query) {
    std::fill_n(parts + query * size, size, 0.0f);
    parts[query * size] = kNever;
  }
  constexpr int kSpanBlocks = kSpan / kBlockTokens;
  constexpr int kQueriesPerValue = kQueriesAtOnce / 2;  // 4 vectors of values stay in registers beside their sums
  for (int from = first; from < last; from += kSpanBlocks) {
    const int count = std::min(last - from, kSpanBlocks);
    for (int b = 0; b < count; ++b) {
      const uint16_t* keys = model.keys(blocks[from + b], layer, head);
      for (int query = 0; query < queries; query += kQueriesAtOnce)
        with_constant<kQueriesAtOnce>(std::min(queries - query, kQueriesAtOnce), [&](auto n) {
          score_block<n()>(s, query, keys, shape.head_dim, (from + b) * kBlockTokens, b * kBlockTokens);
        });
    }
    for (int query = 0; query < queries; ++query) soften(s, query, count * kBlockTokens, parts + query * size);
    for (int query = 0; query < queries; query += kQueriesPerValue)
      with_constant<kQueriesPerValue>(std::min(queries - query, kQueriesPerValue), [&](auto n) {
        for (int dim = 0; dim < shape.value_dim(); dim += 4 * kLanes)
          with_constant<4>(std::min((shape.value_dim() - dim) / kLanes, 4), [&](auto v) {
            add_values<n(), v()>(s, query, model, layer, head, blocks + from, count, dim, parts + query * size, size);
          });
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
