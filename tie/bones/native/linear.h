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

// As many rows of activations meet a vector of weights as there are registers for sums.
constexpr int kRowsAtOnce = kRegisters / 4;
constexpr int kTilesAtOnce = 32;  // at most, in one call of multiply()
// Weights are asked for so many bytes before they are read: with what processors fetch by themselves, steps of several
// rows take up to half as long again. (bfloat16 and one or two rows: so little is done with each byte that it costs.)
constexpr int kFetchAhead = 8192;

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
  float* scale_at(int block, int group, int slot) const {
    return scales + (static_cast<size_t>(block) * groups + group) * 2 * kSlots + slot;
  }

  // Takes a row, [groups][32].
  void put(int row, const float* values) const {
    for (int group = 0; group < groups; ++group, values += kGroup) put_group(row, group, values);
  }
  void put_group(int row, int group, const float* values) const {
    const int block = row / block_rows, slot = row % block_rows;
    uint8_t* to = at(block, group, slot);
    if (width == 2) {
      for (int i = 0; i < kGroup; i += kWidth) store_bf16(reinterpret_cast<uint16_t*>(to) + i, load(values + i));
      return;
    }
    Floats x[kGroup / kWidth], most{}, total{};
    for (int i = 0; i < kGroup / kWidth; ++i) {
      x[i] = load(values + i * kWidth);
      most = larger(most, magnitude(x[i]));
    }
    const float limit = largest(most), inverse = limit > 0 ? 127 / limit : 0;
    for (int i = 0; i < kGroup / kWidth; ++i) {
      x[i] = nearest(x[i] * inverse);
      store_i8(reinterpret_cast<int8_t*>(to) + i * kWidth, x[i]);
      total += x[i];
    }
    float* scale = scale_at(block, group, slot);
    scale[0] = limit / 127;
    scale[kSlots] = scale[0] * sum(total);
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

// Each: out[n] = a strip of a tile, kWidth output rows, times row n of a block; one output to a lane.
template <Format kFormat, int N>
TIE_INLINE void strip_few_bits(const uint8_t* codes, const uint8_t* scales, int groups, const uint8_t* x,
                               const float* xs, Floats (&out)[N]) {
  constexpr bool kFour = kFormat == Format::kQ4;
  Floats sums[N] = {};  // not `out` itself: that might lie where the weights are read, as far as the compiler knows
  for (int group = 0; group < groups; ++group) {
    Ints dots[N] = {};
#pragma GCC unroll 8
    for (int i = 0; i < (kFour ? 4 : 8); ++i) {
      const Words both = read<Words>(codes + i * kVectorBytes);
      __builtin_prefetch(codes + i * kVectorBytes + kFetchAhead);
      const Words low = kFour ? both & 0x0f0f0f0fu : offset_bytes(both), high = both >> 4 & 0x0f0f0f0fu;
      for (int n = 0; n < N; ++n) {
        const uint8_t* values = x + n * kGroup + i * (kFour ? 8 : 4);
        dots[n] = kFour ? dot_nibbles(dots[n], low, all_words(values)) : dot_bytes(dots[n], low, all_words(values));
        if (kFour) dots[n] = dot_nibbles(dots[n], high, all_words(values + 4));
      }
    }
    __builtin_prefetch(scales + kFetchAhead);
    const Floats scale = load_f16(scales);
    const Floats least = kFour ? load_f16(scales + 2 * kTileRows) : scale * -kByteOffset;
    for (int n = 0; n < N; ++n) {
      sums[n] += __builtin_convertvector(dots[n], Floats) * (scale * xs[n]);
      if (kFour || kByteOffset != 0) sums[n] += least * xs[n + Activations::kSlots];
    }
    codes += (kFour ? 4 : 8) * kVectorBytes;
    scales += (kFour ? 4 : 2) * kTileRows;
    x += Activations::kSlots * kGroup;
    xs += 2 * Activations::kSlots;
  }
  std::copy_n(sums, N, out);
}

// Not inlined: its many sums get registers of their own this way, and it is a third faster with many rows (GCC 12).
template <int N>
__attribute__((noinline)) void strip_bf16(const uint8_t* codes, int groups, const uint8_t* x, Floats (&out)[N]) {
  // Each product waits for the sum before it: with few rows, several sums run side by side.
  constexpr int kChains = N <= 2 ? 4 : 2;
  Floats sums[kChains][N];
  for (auto& chain : sums) std::fill_n(chain, N, Floats{});
  for (int group = 0; group < groups; ++group) {
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / 2; ++i) {
      const Words weights = read<Words>(codes + i * kVectorBytes);
      if (N > 2) __builtin_prefetch(codes + i * kVectorBytes + kFetchAhead);
      for (int n = 0; n < N; ++n)
        sums[i % kChains][n] = dot_pairs(sums[i % kChains][n], weights, all_words(x + (n * kGroup + 2 * i) * 2));
    }
    codes += kGroup / 2 * kVectorBytes;
    x += Activations::kSlots * kGroup * 2;
  }
  for (int n = 0; n < N; ++n) {
    out[n] = sums[0][n];
    for (int chain = 1; chain < kChains; ++chain) out[n] += sums[chain][n];
  }
}

// N rows of a block times tiles first..last: out is [N][kTilesAtOnce * kTileRows].
template <int N>
void tiles_times(const Matrix& w, int first, int last, const Activations& x, int block, int slot, float* out) {
  const uint8_t* values = x.at(block, 0, slot);
  const float* xs = x.scale_at(block, 0, slot);
  for (int row = first * kTileRows; row < last * kTileRows; row += kWidth, out += kWidth) {
    const uint8_t *codes = w.codes(row), *scales = w.scales(row);
    Floats sums[N];
    if (w.format == Format::kBf16)
      strip_bf16(codes, w.groups(), values, sums);
    else if (w.format == Format::kQ4)
      strip_few_bits<Format::kQ4>(codes, scales, w.groups(), values, xs, sums);
    else
      strip_few_bits<Format::kQ8>(codes, scales, w.groups(), values, xs, sums);
    for (int n = 0; n < N; ++n) write(out + n * kTilesAtOnce * kTileRows, sums[n]);
  }
}

// Calls use(row, its outputs) for each row; the outputs are those of tiles first..last, and may be written over.
template <class Use>
void multiply(const Matrix& w, int first, int last, const Activations& x, int rows, Use use) {
  alignas(64) float out[kRowsAtOnce][kTilesAtOnce * kTileRows];
  for (int row = 0; row < rows;) {
    const int block = row / x.block_rows, slot = row % x.block_rows;
    const int count = std::min({rows - row, x.block_rows - slot, kRowsAtOnce});
    with_constant<kRowsAtOnce>(count, [&](auto n) { tiles_times<n()>(w, first, last, x, block, slot, out[0]); });
    for (int i = 0; i < count; ++i, ++row) use(row, out[i]);
  }
}

// One row of a matrix as floats, [w.columns]. For the embedding.
inline void unpack_row(const Matrix& w, int row, float* out) {
  for (int i = 0; i < w.columns; ++i) {
    const auto word = [&](int values) { return w.codes(row) + static_cast<size_t>(i / values) * kVectorBytes; };
    const auto scale = [&](int minimum) {
      const uint8_t* scales = w.scales(row) + i / kGroup * w.scale_bytes();
      return static_cast<float>(read<_Float16>(scales + minimum * kTileRows * 2));
    };
    if (w.format == Format::kQ4) {
      out[i] = scale(0) * static_cast<float>(word(8)[i % 4] >> i / 4 % 2 * 4 & 15) + scale(1);
    } else if (w.format == Format::kQ8) {
      out[i] = scale(0) * static_cast<int8_t>(word(4)[i % 4]);
    } else {
      const uint32_t bits = static_cast<uint32_t>(read<uint16_t>(word(2) + i % 2 * 2)) << 16;
      out[i] = read<float>(&bits);
    }
  }
}

}  // namespace tie
