// Matrix products: rows of activations times tiles of weights.
//
// Weights of 4 and 8 bits meet activations of 8 bits, rounded per 32 values of each row: the products of a group are
// summed as whole numbers and scaled once. (A scale per row would lose outliers, one per batch would couple sequences.)
#pragma once

#include <algorithm>
#include <type_traits>

#include "model.h"
#include "simd.h"

namespace tie {

// Rows of activations as the kernels read them. Blocks of up to kSlots rows lie interleaved, group by group, so that
// every address within a block is one pointer plus a constant.
struct Activations {
  static constexpr int kSlots = 8;

  uint8_t* data = nullptr;  // [block][group][slot][32], int8 or bf16
  float* scales = nullptr;  // [block][group][2][slot]: the scale, and scale * sum of the integers; none with bf16
  int room = 0;             // groups that there is memory for, in each block
  int block_rows = 0;       // rows in a block: as even as can be, for half-empty blocks waste time
  int groups = 0;
  int width = 0;  // bytes of a value

  // The same memory for `rows` rows that will meet `weights`, from the block of a member on.
  Activations shaped(int rows, const Matrix& weights, int member = 0) const {
    const int blocks = (rows + kSlots - 1) / kSlots;
    const size_t before = static_cast<size_t>(member) * room * kSlots;
    return {data + before * kGroup * sizeof(uint16_t), scales + before * 2, room, (rows + blocks - 1) / blocks,
            weights.groups(), weights.format == Format::kBf16 ? 2 : 1};
  }
  uint8_t* at(int block, int group, int slot) const {
    return data + ((static_cast<size_t>(block) * groups + group) * kSlots + slot) * kGroup * width;
  }
  float* scale_at(int block, int group) const {
    return scales + (static_cast<size_t>(block) * groups + group) * 2 * kSlots;
  }

  // Takes 32 values of a row.
  TIE_INLINE void put_bf16(uint8_t* to, F a, F b) {
    uint16_t halves[kGroup];
    store_bf16(halves, a);
    store_bf16(halves + kLanes, b);
    std::memcpy(to, halves, sizeof halves);
  }
  TIE_INLINE void put_bytes(uint8_t* to, float* scale, F a, F b) {
    const float most = largest(larger(magnitude(a), magnitude(b)));
    const F inverse = all(most > 0 ? 127 / most : 0);
    a = nearest(a * inverse);
    b = nearest(b * inverse);
    int8_t whole[kGroup];
    store_i8(whole, a);
    store_i8(whole + kLanes, b);
    std::memcpy(to, whole, sizeof whole);
    scale[0] = most / 127;
    scale[kSlots] = scale[0] * sum(a + b);
  }
  void put(int row, int group, F a, F b) const {
    const int block = row / block_rows, slot = row % block_rows;
    if (width == 2)
      put_bf16(at(block, group, slot), a, b);
    else
      put_bytes(at(block, group, slot), scale_at(block, group) + slot, a, b);
  }
  void put_row(int row, const float* values) const {
    for (int group = 0; group < groups; ++group, values += kGroup) put(row, group, load(values), load(values + kLanes));
  }
};

// Calls f with the whole number n, 1 <= n <= N, as a compile-time constant.
template <int N, class Function>
TIE_INLINE void with_constant(int n, Function f) {
  if constexpr (N == 1)
    f(std::integral_constant<int, 1>());
  else if (n == N)
    f(std::integral_constant<int, N>());
  else
    with_constant<N - 1>(n, f);
}

// Each: out[n] = the tile times row n, one output row of the tile to a lane.
template <Format kFormat, int N>
TIE_INLINE void tile_few_bits(const uint8_t* codes, const uint8_t* scales, int groups, const uint8_t* x,
                              const float* xs, F (&out)[N]) {
  constexpr bool kFour = kFormat == Format::kQ4;
  F sums[N];  // not `out` itself: that might lie where the weights are read, as far as the compiler knows
  for (F& s : sums) s = zero();
  for (int group = 0; group < groups; ++group) {
    I dots[N];
    for (I& dot : dots) dot = no_sum();
#pragma GCC unroll 8
    for (int i = 0; i < (kFour ? 4 : 8); ++i) {
      const B codes_here = bytes(codes + i * 64);
      const B low = kFour ? low_nibbles(codes_here) : offset_bytes(codes_here), high = high_nibbles(codes_here);
      for (int n = 0; n < N; ++n) {
        const uint8_t* values = x + n * kGroup + i * (kFour ? 8 : 4);
        dots[n] = kFour ? dot_nibbles(dots[n], low, values) : dot_bytes(dots[n], low, values);
        if (kFour) dots[n] = dot_nibbles(dots[n], high, values + 4);
      }
    }
    const F scale = load_f16(scales), least = kFour ? load_f16(scales + 2 * kLanes) : scale * all(-kByteOffset);
    for (int n = 0; n < N; ++n) {
      sums[n] = fma(to_float(dots[n]), scale * all(xs[n]), sums[n]);
      if (kFour || kByteOffset != 0) sums[n] = fma(least, all(xs[n + Activations::kSlots]), sums[n]);
    }
    codes += (kFour ? 4 : 8) * 64;
    scales += (kFour ? 4 : 2) * kLanes;
    x += Activations::kSlots * kGroup;
    xs += 2 * Activations::kSlots;
  }
  for (int n = 0; n < N; ++n) out[n] = sums[n];
}

// Not inlined: its many sums get registers of their own this way, and it is a third faster with many rows (GCC 12).
template <int N>
__attribute__((noinline)) void tile_bf16(const uint8_t* codes, int groups, const uint8_t* x, F (&out)[N]) {
  // Each product waits for the sum before it: with few rows, several sums run side by side.
  constexpr int kChains = N <= 2 ? 4 : N <= 8 ? 2 : 1;
  F sums[kChains][N];
  for (auto& chain : sums)
    for (F& s : chain) s = zero();
  for (int group = 0; group < groups; ++group) {
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / 2; ++i) {
      const Pairs weights = pairs(reinterpret_cast<const uint16_t*>(codes + i * 64));
      for (int n = 0; n < N; ++n)
        sums[i % kChains][n] = dot_pairs(sums[i % kChains][n], weights, x + (n * kGroup + 2 * i) * 2);
    }
    codes += kGroup / 2 * 64;
    x += Activations::kSlots * kGroup * 2;
  }
  for (int n = 0; n < N; ++n) {
    out[n] = sums[0][n];
    for (int chain = 1; chain < kChains; ++chain) out[n] = out[n] + sums[chain][n];
  }
}

template <int N>
TIE_INLINE void tile_times(const Matrix& w, int tile, const Activations& x, int block, int slot, F (&out)[N]) {
  const uint8_t* codes = w.tile(tile);
  const uint8_t* scales = codes + w.code_bytes();
  const uint8_t* values = x.at(block, 0, slot);
  if (w.format == Format::kBf16)
    tile_bf16(codes, w.groups(), values, out);
  else if (w.format == Format::kQ4)
    tile_few_bits<Format::kQ4>(codes, scales, w.groups(), values, x.scale_at(block, 0) + slot, out);
  else
    tile_few_bits<Format::kQ8>(codes, scales, w.groups(), values, x.scale_at(block, 0) + slot, out);
}

// Calls use(first_row, count as a constant, block, slot) for pieces of rows as large as registers allow.
template <class Use>
TIE_INLINE void for_rows(const Activations& x, int rows, Use use) {
  for (int row = 0, block = 0; row < rows; row += x.block_rows, ++block) {
    const int held = std::min(rows - row, x.block_rows);
    for (int slot = 0; slot < held; slot += kRowsAtOnce) {
      with_constant<kRowsAtOnce>(std::min(held - slot, kRowsAtOnce), [&](auto n) { use(row + slot, n, block, slot); });
    }
  }
}

// Calls use(row, tile, 16 outputs) for all rows and the tiles from first to last.
template <class Use>
void multiply(const Matrix& w, int first, int last, const Activations& x, int rows, Use use) {
  for_rows(x, rows, [&](int row, auto n, int block, int slot) {
    F out[n()];
    for (int tile = first; tile < last; ++tile) {
      tile_times(w, tile, x, block, slot, out);
      for (int i = 0; i < n(); ++i) use(row + i, tile, out[i]);
    }
  });
}

TIE_INLINE F swiglu(F gate, F up) { return gate / (all(1) + exponential(zero() - gate)) * up; }

// Groups first..last of 32 columns of silu(gate x) * (up x), straight into the activations of the next product.
inline void multiply_gated(const Matrix& w, int first, int last, const Activations& x, int rows,
                           const Activations& result) {
  for_rows(x, rows, [&](int row, auto n, int block, int slot) {
    constexpr int kCount = n();
    F gate[kCount], up[kCount], half[kCount];
    for (int group = first; group < last; ++group) {
      for (int side = 0; side < 2; ++side) {
        const int tile = 4 * group + 2 * side;
        tile_times(w, tile, x, block, slot, gate);
        tile_times(w, tile + 1, x, block, slot, up);
        for (int i = 0; i < kCount; ++i) {
          const F both = swiglu(gate[i], up[i]);
          if (side == 0)
            half[i] = both;
          else
            result.put(row + i, group, half[i], both);
        }
      }
    }
  });
}

// One row of a matrix as floats, [w.columns]. For the embedding.
inline void unpack_row(const Matrix& w, int row, float* out) {
  const uint8_t* tile = w.tile(row / kTileRows);
  const int lane = row % kTileRows, words = w.format == Format::kBf16 ? 2 : w.format == Format::kQ8 ? 4 : 8;
  float scale[kLanes] = {}, least[kLanes] = {};
  for (int i = 0; i < w.columns; ++i) {
    const uint8_t* word = tile + (static_cast<size_t>(i / words) * kTileRows + lane) * 4;  // of `words` values
    const uint8_t* scales = tile + w.code_bytes() + i / kGroup * w.scale_bytes();
    if (w.format == Format::kBf16) {
      out[i] = bf16_to_float(read<uint16_t>(word + i % 2 * 2));
      continue;
    }
    if (i % kGroup == 0) store(scale, load_f16(scales));
    if (i % kGroup == 0 && w.format == Format::kQ4) store(least, load_f16(scales + 2 * kLanes));
    const int code = w.format == Format::kQ8 ? static_cast<int8_t>(word[i % 4]) : word[i % 4] >> (i / 4 % 2 * 4) & 15;
    out[i] = scale[lane] * static_cast<float>(code) + least[lane];
  }
}

}  // namespace tie
