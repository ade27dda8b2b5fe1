// Sixteen lanes of arithmetic.
//
// Everything above this file is written once, in terms of these types, and most of this file is too, in the compiler's
// own vectors of the machine's width. The library is built several times from the same sources with different flags;
// only what has an instruction of its own that a compiler does not find is spelled out for an instruction set.
#pragma once

#include <cmath>
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

// Rows of activations that a kernel keeps in registers, and queries that meet a block of keys: as many as there are
// registers for.
#if TIE_AVX512
constexpr int kWidth = 16, kRowsAtOnce = 8, kQueriesAtOnce = 8;
#if defined(__AVX512BF16__)
constexpr const char* kLevel = "avx512";
#else
constexpr const char* kLevel = "avx512vnni";
#endif
#elif TIE_AVX2
constexpr int kWidth = 8, kRowsAtOnce = 2, kQueriesAtOnce = 4;
#if defined(__AVXVNNI__)
constexpr const char* kLevel = "avxvnni";
#else
constexpr const char* kLevel = "avx2";
#endif
#else
constexpr int kWidth = 4, kRowsAtOnce = 2, kQueriesAtOnce = 2;
constexpr const char* kLevel = "portable";
#endif

constexpr int kLanes = 16, kParts = kLanes / kWidth;

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));
typedef int8_t Bytes __attribute__((vector_size(kWidth)));

struct F { Floats v[kParts]; };  // 16 floats
struct I { Ints v[kParts]; };    // 16 sums of integers
struct B { Words v[kParts]; };   // 64 bytes, four to a lane

// A result made part by part. Not a loop: a compiler must see at once that nothing here needs memory.
template <class T, class Part>
TIE_INLINE T each(Part part) {
  if constexpr (kParts == 1) return {{part(0)}};
  if constexpr (kParts == 2) return {{part(0), part(1)}};
  if constexpr (kParts == 4) return {{part(0), part(1), part(2), part(3)}};
}

// A value that lies anywhere.
template <class T>
TIE_INLINE T read(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
TIE_INLINE uint32_t word_at(const void* p) { return read<uint32_t>(p); }

TIE_INLINE float bf16_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  return read<float>(&bits);
}

// To the nearest, ties to even. What is not a number stays that: it must be seen in the logits.
TIE_INLINE uint16_t float_to_bf16(float value) {
  const uint32_t bits = word_at(&value);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

TIE_INLINE F all(float x) { return each<F>([&](int) { return x - Floats{}; }); }
TIE_INLINE F zero() { return all(0); }
TIE_INLINE F load(const float* p) { return each<F>([&](int i) { return read<Floats>(p + i * kWidth); }); }
TIE_INLINE void store(float* p, F a) {
  for (int i = 0; i < kParts; ++i) std::memcpy(p + i * kWidth, &a.v[i], sizeof a.v[i]);
}
TIE_INLINE F operator+(F a, F b) { return each<F>([&](int i) { return a.v[i] + b.v[i]; }); }
TIE_INLINE F operator-(F a, F b) { return each<F>([&](int i) { return a.v[i] - b.v[i]; }); }
TIE_INLINE F operator*(F a, F b) { return each<F>([&](int i) { return a.v[i] * b.v[i]; }); }
TIE_INLINE F operator/(F a, F b) { return each<F>([&](int i) { return a.v[i] / b.v[i]; }); }
TIE_INLINE F fma(F a, F b, F c) {  // one instruction where there is one: see -ffp-contract
  return each<F>([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
TIE_INLINE F larger(F a, F b) { return each<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
TIE_INLINE F magnitude(F a) { return each<F>([&](int i) { return (Floats)((Words)a.v[i] & 0x7fffffffu); }); }
TIE_INLINE F nearest(F a) {  // |a| < 2^22: beyond 2^23 floats are whole, so the sum is rounded
  return each<F>([&](int i) { return (a.v[i] + 0x1.8p23f) - 0x1.8p23f; });
}
TIE_INLINE Ints lane_numbers(int part) {
  static constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return read<Ints>(kNumbers + part * kWidth);
}
// Lanes first..last of a, `other` elsewhere.
TIE_INLINE F keep(F a, int first, int last, F other) {
  return each<F>([&](int i) {
    const Ints lane = lane_numbers(i), from = first - Ints{}, to = last - Ints{};
    return (lane >= from) & (lane <= to) ? a.v[i] : other.v[i];
  });
}
TIE_INLINE void store_i8(int8_t* p, F whole) {  // |whole| <= 127, or not a number: then anything
#if TIE_AVX2
  const __m256i words = _mm256_permute4x64_epi64(
      _mm256_packs_epi32(_mm256_cvtps_epi32(whole.v[0]), _mm256_cvtps_epi32(whole.v[1])), 0xd8);
  const __m128i packed = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  std::memcpy(p, &packed, sizeof packed);
#else
  for (int i = 0; i < kParts; ++i) {
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(whole.v[i], Ints), Bytes);
    std::memcpy(p + i * kWidth, &bytes, sizeof bytes);
  }
#endif
}

TIE_INLINE I no_sum() { return {}; }
TIE_INLINE F to_float(I a) { return each<F>([&](int i) { return __builtin_convertvector(a.v[i], Floats); }); }
TIE_INLINE B bytes(const uint8_t* p) { return each<B>([&](int i) { return read<Words>(p + i * sizeof(Words)); }); }
TIE_INLINE B low_nibbles(B a) { return each<B>([&](int i) { return a.v[i] & 0x0f0f0f0fu; }); }
TIE_INLINE B high_nibbles(B a) { return each<B>([&](int i) { return a.v[i] >> 4 & 0x0f0f0f0fu; }); }

// dot_nibbles, dot_bytes: each lane of the result is acc plus the four bytes of w (unsigned; signed) times the four at x
// (signed). Where the instruction wants unsigned bytes, signed ones are moved up by kByteOffset first, and the caller
// takes that off again.
#if TIE_AVX512 || defined(__AVXVNNI__)
constexpr float kByteOffset = 128;
TIE_INLINE B offset_bytes(B a) { return each<B>([&](int i) { return a.v[i] ^ 0x80808080u; }); }
TIE_INLINE I dot_nibbles(I acc, B w, const uint8_t* x) {
  const int four = static_cast<int>(word_at(x));
#if TIE_AVX512
  return {{(Ints)_mm512_dpbusd_epi32((__m512i)acc.v[0], (__m512i)w.v[0], _mm512_set1_epi32(four))}};
#else
  return each<I>([&](int i) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)acc.v[i], (__m256i)w.v[i], _mm256_set1_epi32(four));
  });
#endif
}
TIE_INLINE I dot_bytes(I acc, B w, const uint8_t* x) { return dot_nibbles(acc, w, x); }
#elif TIE_AVX2
constexpr float kByteOffset = 0;
TIE_INLINE B offset_bytes(B a) { return a; }
// Pairs of products are summed in 16 bits, which 2 * 15 * 127 and 2 * 128 * 127 fit.
TIE_INLINE Ints add_products(Ints acc, __m256i w, __m256i x) {
  return acc + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
}
TIE_INLINE I dot_nibbles(I acc, B w, const uint8_t* x) {
  const __m256i four = _mm256_set1_epi32(static_cast<int>(word_at(x)));
  return each<I>([&](int i) { return add_products(acc.v[i], (__m256i)w.v[i], four); });
}
TIE_INLINE I dot_bytes(I acc, B w, const uint8_t* x) {  // |w| * (x with w's sign)
  const __m256i four = _mm256_set1_epi32(static_cast<int>(word_at(x)));
  return each<I>([&](int i) {
    const __m256i part = (__m256i)w.v[i];
    return add_products(acc.v[i], _mm256_abs_epi8(part), _mm256_sign_epi8(four, part));
  });
}
#else
constexpr float kByteOffset = 0;
TIE_INLINE B offset_bytes(B a) { return a; }
TIE_INLINE I dot_bytes(I acc, B w, const uint8_t* x) {
  const auto times = [&](int j) { return static_cast<int8_t>(x[j]); };
  return each<I>([&](int i) {
    const Ints a = (Ints)w.v[i];
    return acc.v[i] + ((Ints)(w.v[i] << 24) >> 24) * times(0) + ((Ints)(w.v[i] << 16) >> 24) * times(1) +
           ((Ints)(w.v[i] << 8) >> 24) * times(2) + (a >> 24) * times(3);
  });
}
TIE_INLINE I dot_nibbles(I acc, B w, const uint8_t* x) { return dot_bytes(acc, w, x); }
#endif

// Pairs of bf16: `dot_pairs` adds to each lane of acc a pair of w times the pair at x.
#if defined(__AVX512BF16__) && TIE_AVX512
struct Pairs { __m512bh v; };
TIE_INLINE Pairs pairs(const uint16_t* p) { return {read<__m512bh>(p)}; }
TIE_INLINE F dot_pairs(F acc, Pairs w, const void* x) {
  return {{(Floats)_mm512_dpbf16_ps((__m512)acc.v[0], w.v,
                                    (__m512bh)_mm512_set1_epi32(static_cast<int>(word_at(x))))}};
}
TIE_INLINE void store_bf16(uint16_t* p, F a) {
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)a.v[0]);
  std::memcpy(p, &halves, sizeof halves);
}
#else
struct Pairs { F even, odd; };
TIE_INLINE Pairs pairs(const uint16_t* p) {
  const B a = bytes(reinterpret_cast<const uint8_t*>(p));
  return {each<F>([&](int i) { return (Floats)(a.v[i] << 16); }),
          each<F>([&](int i) { return (Floats)(a.v[i] & 0xffff0000u); })};
}
TIE_INLINE F dot_pairs(F acc, Pairs w, const void* x) {
  const uint32_t pair = word_at(x);
  const float even = bf16_to_float(static_cast<uint16_t>(pair)), odd = bf16_to_float(static_cast<uint16_t>(pair >> 16));
  return fma(w.odd, all(odd), fma(w.even, all(even), acc));
}
TIE_INLINE void store_bf16(uint16_t* p, F a) {
  float x[kLanes];
  store(x, a);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(x[i]);
}
#endif

// Sixteen numbers of IEEE 754 binary16.
TIE_INLINE F load_f16(const uint8_t* p) {
#if TIE_AVX512
  return {{(Floats)_mm512_cvtph_ps(read<__m256i>(p))}};
#elif TIE_AVX2
  return each<F>([&](int i) { return (Floats)_mm256_cvtph_ps(read<__m128i>(p + i * sizeof(__m128i))); });
#else
  // The exponent's bias differs by 112: a product puts it right, and what has no leading one (subnormal numbers) as well.
  return each<F>([&](int i) {
    const Words bits = __builtin_convertvector(read<Halves>(p + i * sizeof(Halves)), Words), rest = bits << 13 & 0x0fffe000u;
    const Words special = (rest >= 0x0f800000u ? rest | 0x7f800000u : Words{});  // infinite, or not a number
    const Words value = (Words)((Floats)rest * 0x1p112f);
    return (Floats)((special != 0 ? special : value) | (bits & 0x8000u) << 16);
  });
#endif
}

#if TIE_AVX512
TIE_INLINE float sum(F a) { return _mm512_reduce_add_ps((__m512)a.v[0]); }
TIE_INLINE float largest(F a) { return _mm512_reduce_max_ps((__m512)a.v[0]); }
#else
template <class Join>
TIE_INLINE float fold(F a, Join join) {
  float x[kLanes];
  store(x, a);
#pragma GCC unroll 4
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = join(x[i], x[i + width]);
  return x[0];
}
TIE_INLINE float sum(F a) { return fold(a, [](float x, float y) { return x + y; }); }
TIE_INLINE float largest(F a) { return fold(a, [](float x, float y) { return x > y ? x : y; }); }
#endif

// e^x by 2^(whole part) and a polynomial for the rest; 0 below -87, where float32 ends. For softmax and sigmoid.
TIE_INLINE F exponential(F x) {
  const F least = all(-87.0f), most = all(88.0f);
  const F t = (zero() - larger(zero() - larger(x, least), zero() - most)) * all(1.44269504f);
  const F n = nearest(t), f = t - n;
  F p = all(1.5403530e-4f);  // ln(2)^k / k!, k = 6..0
  p = fma(p, f, all(1.3333558e-3f));
  p = fma(p, f, all(9.6181291e-3f));
  p = fma(p, f, all(5.5504109e-2f));
  p = fma(p, f, all(2.4022651e-1f));
  p = fma(p, f, all(6.9314718e-1f));
  p = fma(p, f, all(1.0f));
#if TIE_AVX512
  return {{(Floats)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x.v[0], (__m512)least.v[0], _CMP_GE_OQ),
                                          (__m512)p.v[0], (__m512)n.v[0])}};
#else
  return each<F>([&](int i) {
    const Ints power = (__builtin_convertvector(n.v[i], Ints) + 127) << 23;
    return (Floats)((Ints)(p.v[i] * (Floats)power) & (x.v[i] >= least.v[i]));
  });
#endif
}

}  // namespace tie
