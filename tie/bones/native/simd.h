// Sixteen lanes of arithmetic, in three spellings of one meaning.
//
// Everything above this file is written once, in terms of these types. The library is built several times from the same
// sources with different compiler flags, and the flags choose the spelling: AVX-512 (with VNNI and bf16 products), AVX2,
// or plain C++ that any compiler turns into what its machine has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define TIE_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TIE_AVX2 1
#include <immintrin.h>
#endif

#define TIE_INLINE static inline __attribute__((always_inline))

namespace tie {

constexpr int kLanes = 16;

TIE_INLINE uint32_t word_at(const void* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

TIE_INLINE float bf16_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To the nearest, ties to even. What is not a number stays that: it must be seen in the logits.
TIE_INLINE uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if TIE_AVX512

constexpr const char* kLevel = "avx512";
constexpr int kRowsAtOnce = 8;     // rows of activations that a kernel keeps in registers
constexpr int kQueriesAtOnce = 8;  // likewise, queries that meet a block of keys

struct F { __m512 v; };   // 16 floats
struct I { __m512i v; };  // 16 sums of integers
struct B { __m512i v; };  // 64 bytes

TIE_INLINE F zero() { return {_mm512_setzero_ps()}; }
TIE_INLINE F all(float x) { return {_mm512_set1_ps(x)}; }
TIE_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
TIE_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
TIE_INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
TIE_INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
TIE_INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
TIE_INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
TIE_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TIE_INLINE F larger(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
TIE_INLINE F magnitude(F a) { return {_mm512_abs_ps(a.v)}; }
TIE_INLINE F nearest(F a) { return {_mm512_roundscale_ps(a.v, 0)}; }
TIE_INLINE float sum(F a) { return _mm512_reduce_add_ps(a.v); }
TIE_INLINE float largest(F a) { return _mm512_reduce_max_ps(a.v); }
// p * 2^n for whole n; lanes where x < limit become 0.
TIE_INLINE F scale_or_zero(F p, F n, F x, F limit) {
  return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ), p.v, n.v)};
}
// Lanes first..last of a, `other` elsewhere.
TIE_INLINE F keep(F a, int first, int last, F other) {
  const uint32_t upto = last >= 15 ? 0xffffu : last < 0 ? 0u : (2u << last) - 1;
  const uint32_t from = first <= 0 ? 0xffffu : first > 15 ? 0u : 0xffffu << first;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(upto & from), other.v, a.v)};
}
TIE_INLINE F load_bf16(const uint16_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
TIE_INLINE void store_bf16(uint16_t* p, F a) {
  const __m256bh halves = _mm512_cvtneps_pbh(a.v);
  std::memcpy(p, &halves, sizeof halves);
}
TIE_INLINE F load_f16(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TIE_INLINE void store_i8(int8_t* p, F whole) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(whole.v)));
}
TIE_INLINE I no_sum() { return {_mm512_setzero_si512()}; }
TIE_INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
TIE_INLINE B bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
TIE_INLINE B low_nibbles(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
TIE_INLINE B high_nibbles(B a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// Each lane: four bytes of w times the four of x, added to acc. Nibbles are unsigned.
TIE_INLINE I dot_nibbles(I acc, B w, const uint8_t* x) {
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(static_cast<int>(word_at(x))))};
}
// The instruction wants unsigned weights: signed ones are moved up by 128, which the caller takes off again.
constexpr float kByteOffset = 128;
TIE_INLINE B offset_bytes(B a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(static_cast<char>(0x80)))}; }
TIE_INLINE I dot_bytes(I acc, B w, const uint8_t* x) { return dot_nibbles(acc, w, x); }
struct Pairs { __m512bh v; };  // 16 pairs of bf16
TIE_INLINE Pairs pairs(const uint16_t* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
// Each lane: a pair of w times the pair x, added to acc.
TIE_INLINE F dot_pairs(F acc, Pairs w, const void* x) {
  return {_mm512_dpbf16_ps(acc.v, w.v, (__m512bh)_mm512_set1_epi32(static_cast<int>(word_at(x))))};
}

#elif TIE_AVX2

constexpr const char* kLevel = "avx2";
constexpr int kRowsAtOnce = 2;
constexpr int kQueriesAtOnce = 4;

struct F { __m256 lo, hi; };
struct I { __m256i lo, hi; };
struct B { __m256i lo, hi; };

TIE_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TIE_INLINE F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TIE_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TIE_INLINE void store(float* p, F a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
TIE_INLINE F operator+(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
TIE_INLINE F operator-(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
TIE_INLINE F operator*(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
TIE_INLINE F operator/(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
TIE_INLINE F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
TIE_INLINE F larger(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
TIE_INLINE F magnitude(F a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
TIE_INLINE F nearest(F a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
TIE_INLINE float sum(F a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
TIE_INLINE float largest(F a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
TIE_INLINE __m256 scale_or_zero(__m256 p, __m256 n, __m256 x, __m256 limit) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(exponent)), _mm256_cmp_ps(x, limit, _CMP_GE_OQ));
}
TIE_INLINE F scale_or_zero(F p, F n, F x, F limit) {
  return {scale_or_zero(p.lo, n.lo, x.lo, limit.lo), scale_or_zero(p.hi, n.hi, x.hi, limit.hi)};
}
TIE_INLINE __m256 keep(__m256 a, int first, int last, __m256 other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                          _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(last)));
  return _mm256_blendv_ps(a, other, _mm256_castsi256_ps(outside));
}
TIE_INLINE F keep(F a, int first, int last, F other) {
  return {keep(a.lo, first, last, other.lo), keep(a.hi, first - 8, last - 8, other.hi)};
}
TIE_INLINE __m256 load_bf16_8(const uint16_t* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
TIE_INLINE F load_bf16(const uint16_t* p) { return {load_bf16_8(p), load_bf16_8(p + 8)}; }
TIE_INLINE void store_bf16(uint16_t* p, F a) {
  alignas(32) float values[kLanes];
  store(values, a);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(values[i]);
}
TIE_INLINE F load_f16(const uint8_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
TIE_INLINE void store_i8(int8_t* p, F whole) {
  const __m256i words = _mm256_permute4x64_epi64(
      _mm256_packs_epi32(_mm256_cvtps_epi32(whole.lo), _mm256_cvtps_epi32(whole.hi)), 0xd8);
  const __m128i packed = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
TIE_INLINE I no_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
TIE_INLINE F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
TIE_INLINE B bytes(const uint8_t* p) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
TIE_INLINE B low_nibbles(B a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
TIE_INLINE B high_nibbles(B a) { return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)}); }
// Unsigned times signed bytes, four to a lane. Pairs are summed in 16 bits: the caller keeps them from overflowing.
TIE_INLINE __m256i add_products(__m256i acc, __m256i bytes, __m256i signed_bytes) {
  const __m256i twos = _mm256_maddubs_epi16(bytes, signed_bytes);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
}
TIE_INLINE I dot_nibbles(I acc, B w, const uint8_t* x) {  // 2 * 15 * 127 fits 16 bits
  const __m256i four = _mm256_set1_epi32(static_cast<int>(word_at(x)));
  return {add_products(acc.lo, w.lo, four), add_products(acc.hi, w.hi, four)};
}
constexpr float kByteOffset = 0;
TIE_INLINE B offset_bytes(B a) { return a; }
TIE_INLINE I dot_bytes(I acc, B w, const uint8_t* x) {  // |w| * (x with w's sign): 2 * 128 * 127 fits 16 bits
  const __m256i four = _mm256_set1_epi32(static_cast<int>(word_at(x)));
  return {add_products(acc.lo, _mm256_abs_epi8(w.lo), _mm256_sign_epi8(four, w.lo)),
          add_products(acc.hi, _mm256_abs_epi8(w.hi), _mm256_sign_epi8(four, w.hi))};
}
struct Pairs { F even, odd; };
TIE_INLINE __m256 evens(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
TIE_INLINE __m256 odds(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
TIE_INLINE Pairs pairs(const uint16_t* p) {
  const B a = bytes(reinterpret_cast<const uint8_t*>(p));
  return {{evens(a.lo), evens(a.hi)}, {odds(a.lo), odds(a.hi)}};
}
TIE_INLINE F dot_pairs(F acc, Pairs w, const void* x) {
  const __m256i pair = _mm256_set1_epi32(static_cast<int>(word_at(x)));
  const F even{evens(pair), evens(pair)}, odd{odds(pair), odds(pair)};
  return fma(w.odd, odd, fma(w.even, even, acc));
}

#else

constexpr const char* kLevel = "portable";
constexpr int kRowsAtOnce = 2;
constexpr int kQueriesAtOnce = 2;

struct F { float v[kLanes]; };
struct I { int32_t v[kLanes]; };
struct B { uint8_t v[4 * kLanes]; };
struct Pairs { float even[kLanes], odd[kLanes]; };

#define TIE_EACH(type, expression)                 \
  type r;                                          \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
  return r

TIE_INLINE F all(float x) { TIE_EACH(F, x); }
TIE_INLINE F zero() { return all(0); }
TIE_INLINE F load(const float* p) { TIE_EACH(F, p[i]); }
TIE_INLINE void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
TIE_INLINE F operator+(F a, F b) { TIE_EACH(F, a.v[i] + b.v[i]); }
TIE_INLINE F operator-(F a, F b) { TIE_EACH(F, a.v[i] - b.v[i]); }
TIE_INLINE F operator*(F a, F b) { TIE_EACH(F, a.v[i] * b.v[i]); }
TIE_INLINE F operator/(F a, F b) { TIE_EACH(F, a.v[i] / b.v[i]); }
TIE_INLINE F fma(F a, F b, F c) { TIE_EACH(F, a.v[i] * b.v[i] + c.v[i]); }
TIE_INLINE F larger(F a, F b) { TIE_EACH(F, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
TIE_INLINE F magnitude(F a) { TIE_EACH(F, std::fabs(a.v[i])); }
TIE_INLINE F nearest(F a) { TIE_EACH(F, std::nearbyint(a.v[i])); }
TIE_INLINE float sum(F a) {
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
TIE_INLINE float largest(F a) {
  for (int i = 1; i < kLanes; ++i) a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0];
  return a.v[0];
}
TIE_INLINE float power_of_two(float n) {
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
TIE_INLINE F scale_or_zero(F p, F n, F x, F limit) {
  TIE_EACH(F, x.v[i] >= limit.v[i] ? p.v[i] * power_of_two(n.v[i]) : 0.0f);
}
TIE_INLINE F keep(F a, int first, int last, F other) { TIE_EACH(F, i >= first && i <= last ? a.v[i] : other.v[i]); }
TIE_INLINE F load_bf16(const uint16_t* p) { TIE_EACH(F, bf16_to_float(p[i])); }
TIE_INLINE void store_bf16(uint16_t* p, F a) {
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(a.v[i]);
}
TIE_INLINE float half_to_float(uint16_t half) {  // IEEE 754 binary16
  const float sign = half & 0x8000 ? -1.0f : 1.0f;
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 0) return sign * static_cast<float>(fraction) * 0x1p-24f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * static_cast<float>(1024 + fraction) * power_of_two(static_cast<float>(exponent - 25));
}
TIE_INLINE F load_f16(const uint8_t* p) {
  uint16_t halves[kLanes];
  std::memcpy(halves, p, sizeof halves);
  TIE_EACH(F, half_to_float(halves[i]));
}
TIE_INLINE void store_i8(int8_t* p, F whole) {
  // A value that is not a number has no integer; its group's scale says what it was.
  for (int i = 0; i < kLanes; ++i)
    p[i] = whole.v[i] >= -128 && whole.v[i] <= 127 ? static_cast<int8_t>(whole.v[i]) : int8_t{0};
}
TIE_INLINE I no_sum() { TIE_EACH(I, 0); }
TIE_INLINE F to_float(I a) { TIE_EACH(F, static_cast<float>(a.v[i])); }
TIE_INLINE B bytes(const uint8_t* p) {
  B r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
TIE_INLINE B low_nibbles(B a) {
  for (uint8_t& byte : a.v) byte &= 15;
  return a;
}
TIE_INLINE B high_nibbles(B a) {
  for (uint8_t& byte : a.v) byte >>= 4;
  return a;
}
template <class Byte>
TIE_INLINE I dot_four(I acc, const B& w, const uint8_t* x) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) acc.v[i] += static_cast<Byte>(w.v[4 * i + j]) * static_cast<int8_t>(x[j]);
  return acc;
}
TIE_INLINE I dot_nibbles(I acc, const B& w, const uint8_t* x) { return dot_four<uint8_t>(acc, w, x); }
constexpr float kByteOffset = 0;
TIE_INLINE B offset_bytes(B a) { return a; }
TIE_INLINE I dot_bytes(I acc, const B& w, const uint8_t* x) { return dot_four<int8_t>(acc, w, x); }
TIE_INLINE Pairs pairs(const uint16_t* p) {
  Pairs r;
  for (int i = 0; i < kLanes; ++i) {
    r.even[i] = bf16_to_float(p[2 * i]);
    r.odd[i] = bf16_to_float(p[2 * i + 1]);
  }
  return r;
}
TIE_INLINE F dot_pairs(F acc, const Pairs& w, const void* x) {
  const uint32_t pair = word_at(x);
  const float even = bf16_to_float(static_cast<uint16_t>(pair)), odd = bf16_to_float(static_cast<uint16_t>(pair >> 16));
  TIE_EACH(F, acc.v[i] + w.even[i] * even + w.odd[i] * odd);
}
#undef TIE_EACH

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
  return scale_or_zero(p, n, x, least);
}

}  // namespace tie
