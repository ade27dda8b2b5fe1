// A vector of the machine's width.
//
// Everything above this file is written once, in the compiler's own vectors. The library is built several times from the
// same sources with different flags; here is what depends on them: the width, and the few instructions that a compiler
// does not find by itself.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define TIE_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TIE_AVX2 1
#endif
#if TIE_AVX512 || TIE_AVX2
#include <immintrin.h>
#endif

#define TIE_INLINE static inline __attribute__((always_inline))

namespace tie {

#if TIE_AVX512
constexpr int kWidth = 16, kRegisters = 32;
#elif TIE_AVX2
constexpr int kWidth = 8, kRegisters = 16;
#else
constexpr int kWidth = 4, kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));
typedef int16_t Shorts __attribute__((vector_size(2 * kWidth)));
typedef int8_t Bytes __attribute__((vector_size(kWidth)));

// Values that lie anywhere.
template <class T>
TIE_INLINE T read(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
template <class T>
TIE_INLINE void write(void* p, T value) {
  std::memcpy(p, &value, sizeof value);
}
TIE_INLINE Floats load(const float* p) { return read<Floats>(p); }
TIE_INLINE Floats all(float x) { return x - Floats{}; }
TIE_INLINE Words all_words(const void* p) { return read<uint32_t>(p) - Words{}; }

TIE_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
TIE_INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
TIE_INLINE Floats magnitude(Floats a) { return (Floats)((Words)a & 0x7fffffffu); }
TIE_INLINE Floats nearest(Floats a) {  // |a| < 2^22: beyond 2^23 floats are whole, so the sum is rounded
  return (a + 0x1.8p23f) - 0x1.8p23f;
}
// Lanes first..last of a, `other` elsewhere.
TIE_INLINE Floats keep(Floats a, int first, int last, float other) {
  static constexpr int32_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Ints lane = read<Ints>(kNumbers);
  return (lane >= first) & (lane <= last) ? a : all(other);
}

// All lanes joined: one half with the other.
template <class Vector, class Join>
TIE_INLINE float fold(Vector a, Join join) {
  if constexpr (sizeof a == 2 * sizeof(float)) {
    return join(a[0], a[1]);
  } else {
    typedef float Half __attribute__((vector_size(sizeof(Vector) / 2)));
    Half halves[2];
    std::memcpy(halves, &a, sizeof a);
    return fold(join(halves[0], halves[1]), join);
  }
}
TIE_INLINE float sum(Floats a) { return fold(a, [](auto x, auto y) { return x + y; }); }
TIE_INLINE float largest(Floats a) { return fold(a, [](auto x, auto y) { return x > y ? x : y; }); }

// e^x by 2^(whole part) and a polynomial for the rest; 0 below -87, where float32 ends. For softmax and sigmoid.
TIE_INLINE Floats exponential(Floats x) {
  const Floats t = smaller(larger(x, all(-87)), all(88)) * 1.44269504f;  // log2(e)
  const Floats n = nearest(t), f = t - n;
  Floats p = all(1.5403530e-4f);  // ln(2)^k / k!, k = 6..0
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const Floats power = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
  return x >= all(-87) ? p * power : Floats{};
}

// Whole numbers of at most 127 (what is not a number becomes anything), by way of 16 bits: compilers know that one.
TIE_INLINE void store_i8(int8_t* p, Floats whole) {
  write(p, __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(whole, Ints), Shorts), Bytes));
}

// IEEE 754 binary16.
TIE_INLINE Floats load_f16(const uint8_t* p) {
#if TIE_AVX512
  return (Floats)_mm512_cvtph_ps(read<__m256i>(p));
#elif TIE_AVX2
  return (Floats)_mm256_cvtph_ps(read<__m128i>(p));
#else
  Floats values;
  for (int i = 0; i < kWidth; ++i) values[i] = read<_Float16>(p + 2 * i);
  return values;
#endif
}

// dot_nibbles, dot_bytes: each lane of the result is `sum` plus the four bytes of w (unsigned; signed) times the four of x
// (signed). Where the instruction wants unsigned bytes, signed ones are moved up by kByteOffset first, and the caller
// takes that off again.
#if TIE_AVX512 || defined(__AVXVNNI__)
constexpr float kByteOffset = 128;
TIE_INLINE Words offset_bytes(Words w) { return w ^ 0x80808080u; }
TIE_INLINE Ints dot_nibbles(Ints sum, Words w, Words x) {
#if TIE_AVX512
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#endif
}
TIE_INLINE Ints dot_bytes(Ints sum, Words w, Words x) { return dot_nibbles(sum, w, x); }
#else
constexpr float kByteOffset = 0;
TIE_INLINE Words offset_bytes(Words w) { return w; }
#if TIE_AVX2
// Pairs of products are summed in 16 bits, which 2 * 15 * 127 and 2 * 128 * 127 fit.
TIE_INLINE Ints dot_nibbles(Ints sum, Words w, Words x) {
  return sum + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, (__m256i)x), _mm256_set1_epi16(1));
}
TIE_INLINE Ints dot_bytes(Ints sum, Words w, Words x) {  // |w| * (x with w's sign)
  return dot_nibbles(sum, (Words)_mm256_abs_epi8((__m256i)w), (Words)_mm256_sign_epi8((__m256i)x, (__m256i)w));
}
#else
TIE_INLINE Ints dot_bytes(Ints sum, Words w, Words x) {
  for (int up = 0; up < 32; up += 8) sum += ((Ints)(w << up) >> 24) * ((Ints)(x << up) >> 24);
  return sum;
}
TIE_INLINE Ints dot_nibbles(Ints sum, Words w, Words x) { return dot_bytes(sum, w, x); }
#endif
#endif

// bfloat16: each lane of dot_pairs is `sum` plus the pair of w times the pair of x.
#if defined(__AVX512BF16__) && TIE_AVX512
TIE_INLINE Floats dot_pairs(Floats sum, Words w, Words x) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
}
TIE_INLINE void store_bf16(uint16_t* p, Floats a) { write(p, _mm512_cvtneps_pbh((__m512)a)); }
#else
TIE_INLINE Floats dot_pairs(Floats sum, Words w, Words x) {
  sum = (Floats)(w << 16) * (Floats)(x << 16) + sum;
  return (Floats)(w & 0xffff0000u) * (Floats)(x & 0xffff0000u) + sum;
}
TIE_INLINE void store_bf16(uint16_t* p, Floats a) {  // to the nearest, ties to even; what is not a number stays that
  const Words bits = (Words)a, rounded = bits + 0x7fff + (bits >> 16 & 1);
  write(p, __builtin_convertvector((a == a ? rounded : bits | 0x400000) >> 16, Halves));
}
#endif

}  // namespace tie
