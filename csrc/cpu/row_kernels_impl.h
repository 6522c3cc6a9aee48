// The row kernels, written once in 16-wide vectors; each file that includes this compiles them for one instruction
// set. Everything here has internal linkage.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu/row_kernels.h"

namespace moonep {
namespace {

typedef float F16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t U16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t H16 __attribute__((vector_size(32), aligned(2)));
constexpr int64_t kWide = 16;

// ---- dtypes: load 16 elements as fp32, store 16 rounded to nearest even ----

struct Float32 {
  typedef float Element;
  static F16 load(const Element* p) { return *reinterpret_cast<const F16*>(p); }
  static void store(Element* p, F16 v) { *reinterpret_cast<F16*>(p) = v; }
};

struct BFloat16 {
  typedef uint16_t Element;
  static F16 load(const Element* p) {
    const U16 bits = __builtin_convertvector(*reinterpret_cast<const H16*>(p), U16) << 16;
    F16 v;
    memcpy(&v, &bits, sizeof v);
    return v;
  }
  static void store(Element* p, F16 v) {
    U16 bits;
    memcpy(&bits, &v, sizeof bits);
    const U16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const U16 is_nan = (U16)(v != v);
    *reinterpret_cast<H16*>(p) = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), H16);
  }
};

#if !defined(__F16C__) && !defined(__aarch64__)
inline float half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
  uint32_t bits;
  float value;
  if (magnitude >= 0x7c00) {
    bits = sign | 0x7f800000 | ((magnitude & 0x3ff) << 13) | ((magnitude & 0x3ff) ? 0x400000 : 0);
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  // Scaling by 2^112 makes subnormal halves come out exactly, too.
  const uint32_t shifted = magnitude << 13, factor_bits = (127 + 112) << 23;
  float factor;
  memcpy(&value, &shifted, sizeof value);
  memcpy(&factor, &factor_bits, sizeof factor);
  value *= factor;
  memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | ((magnitude >> 13) & 0x1ff));  // NaN, made quiet
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);                               // rounds to infinity
  if (magnitude < 0x38800000) {  // subnormal half: adding 0.5 lets the FPU round at the right bit
    float absolute;
    memcpy(&absolute, &magnitude, sizeof absolute);
    absolute += 0.5f;
    uint32_t rounded;
    memcpy(&rounded, &absolute, sizeof rounded);
    return (uint16_t)(sign | (rounded - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1) - ((127 - 15) << 23);
  return (uint16_t)(sign | (rounded >> 13));
}
#endif

struct Float16 {
  typedef uint16_t Element;
  static F16 load(const Element* p) {
    F16 v;
#if defined(__AVX512F__)
    const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    memcpy(&v, &wide, sizeof v);
#elif defined(__F16C__)
    const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
    const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)));
    memcpy(&v, &low, 32);
    memcpy(reinterpret_cast<char*>(&v) + 32, &high, 32);
#elif defined(__aarch64__)
    for (int i = 0; i < 4; ++i) {
      const float32x4_t part = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
      memcpy(reinterpret_cast<char*>(&v) + 16 * i, &part, 16);
    }
#else
    for (int i = 0; i < kWide; ++i) v[i] = half_to_float(p[i]);
#endif
    return v;
  }
  static void store(Element* p, F16 v) {
#if defined(__AVX512F__)
    __m512 wide;
    memcpy(&wide, &v, sizeof wide);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    __m256 low, high;
    memcpy(&low, &v, 32);
    memcpy(&high, reinterpret_cast<char*>(&v) + 32, 32);
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    for (int i = 0; i < 4; ++i) {
      float32x4_t part;
      memcpy(&part, reinterpret_cast<char*>(&v) + 16 * i, 16);
      vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(part)));
    }
#else
    for (int i = 0; i < kWide; ++i) p[i] = float_to_half(v[i]);
#endif
  }
};

// The last, narrower step of a row goes through a padded copy.
template <typename T>
F16 load_some(const typename T::Element* p, int64_t count) {
  typename T::Element padded[kWide] = {};
  memcpy(padded, p, count * sizeof(*p));
  return T::load(padded);
}

template <typename T>
void store_some(typename T::Element* p, F16 v, int64_t count) {
  typename T::Element padded[kWide];
  T::store(padded, v);
  memcpy(p, padded, count * sizeof(*p));
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// ---- sums ----

// Columns [j, j + 16 * kVectors) of the rows, weighted, summed in order from +0, left in registers.
template <typename T, int kVectors>
inline void sum_columns(F16* sums, const void* const* rows, const float* weights, int64_t count, int64_t j) {
  F16 acc[kVectors];
  for (int v = 0; v < kVectors; ++v) acc[v] = F16{};
  for (int64_t i = 0; i < count; ++i) {
    const typename T::Element* row = (const typename T::Element*)rows[i] + j;
    prefetch((const char*)row + 512);
    if (kVectors * kWide * sizeof(*row) > 64) prefetch((const char*)row + 576);
    if (weights) {
      const float weight = weights[i];
      for (int v = 0; v < kVectors; ++v) acc[v] += T::load(row + v * kWide) * weight;
    } else {
      for (int v = 0; v < kVectors; ++v) acc[v] += T::load(row + v * kWide);
    }
  }
  for (int v = 0; v < kVectors; ++v) sums[v] = acc[v];
}

template <typename T>
inline F16 sum_some(const void* const* rows, const float* weights, int64_t count, int64_t j, int64_t valid) {
  F16 acc = {};
  for (int64_t i = 0; i < count; ++i) {
    const F16 row = load_some<T>((const typename T::Element*)rows[i] + j, valid);
    acc += weights ? row * weights[i] : row;
  }
  return acc;
}

template <typename T>
void sum_rows(float* dst, const void* const* rows, const float* weights, int64_t count, int64_t n) {
  constexpr int kVectors = 4;
  int64_t j = 0;
  for (; j + kVectors * kWide <= n; j += kVectors * kWide) {
    F16 sums[kVectors];
    sum_columns<T, kVectors>(sums, rows, weights, count, j);
    for (int v = 0; v < kVectors; ++v) Float32::store(dst + j + v * kWide, sums[v]);
  }
  for (; j < n; j += kWide) {
    const int64_t valid = n - j < kWide ? n - j : kWide;
    store_some<Float32>(dst + j, sum_some<T>(rows, weights, count, j, valid), valid);
  }
}

template <typename T>
void sum_parts(void* dst_void, const Part* parts, int64_t count, int64_t n) {
  constexpr int kVectors = 4;
  typename T::Element* dst = (typename T::Element*)dst_void;
  int64_t j = 0;
  for (; j + kVectors * kWide <= n; j += kVectors * kWide) {
    F16 total[kVectors] = {}, host[kVectors] = {};
    for (int64_t p = 0; p < count; ++p) {
      if (parts[p].opens_host) {
        for (int v = 0; v < kVectors; ++v) {
          total[v] += host[v];
          host[v] = F16{};
        }
      }
      if (parts[p].sum) {
        prefetch(parts[p].sum + j + 128);
        for (int v = 0; v < kVectors; ++v) host[v] += Float32::load(parts[p].sum + j + v * kWide);
      } else {
        F16 sums[kVectors];
        sum_columns<T, kVectors>(sums, parts[p].rows, parts[p].weights, parts[p].count, j);
        for (int v = 0; v < kVectors; ++v) host[v] += sums[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) T::store(dst + j + v * kWide, total[v] + host[v]);
  }
  for (; j < n; j += kWide) {
    const int64_t valid = n - j < kWide ? n - j : kWide;
    F16 total = {}, host = {};
    for (int64_t p = 0; p < count; ++p) {
      if (parts[p].opens_host) {
        total += host;
        host = F16{};
      }
      host += parts[p].sum ? load_some<Float32>(parts[p].sum + j, valid)
                           : sum_some<T>(parts[p].rows, parts[p].weights, parts[p].count, j, valid);
    }
    store_some<T>(dst + j, total + host, valid);
  }
}

template <typename T>
void scale(void* dst_void, const void* src_void, float weight, int64_t n) {
  typename T::Element* dst = (typename T::Element*)dst_void;
  const typename T::Element* src = (const typename T::Element*)src_void;
  int64_t j = 0;
  for (; j + kWide <= n; j += kWide) T::store(dst + j, T::load(src + j) * weight);
  if (j < n) store_some<T>(dst + j, load_some<T>(src + j, n - j) * weight, n - j);
}

template <typename T>
float dot(const void* a_void, const void* b_void, int64_t n) {
  const typename T::Element* a = (const typename T::Element*)a_void;
  const typename T::Element* b = (const typename T::Element*)b_void;
  F16 acc[2] = {};
  int64_t j = 0;
  for (; j + 2 * kWide <= n; j += 2 * kWide) {
    prefetch((const char*)(a + j) + 512);
    acc[0] += T::load(a + j) * T::load(b + j);
    acc[1] += T::load(a + j + kWide) * T::load(b + j + kWide);
  }
  for (; j < n; j += kWide) {
    const int64_t valid = n - j < kWide ? n - j : kWide;
    acc[0] += load_some<T>(a + j, valid) * load_some<T>(b + j, valid);
  }
  acc[0] += acc[1];
  float total = 0;
  for (int i = 0; i < kWide; ++i) total += acc[0][i];
  return total;
}

// ---- copies ----

#if defined(__x86_64__)
void stream(void* dst, const void* src, size_t bytes) {
  char* to = (char*)dst;
  const char* from = (const char*)src;
  const size_t head = (64 - ((uintptr_t)to & 63)) & 63;
  if (bytes < head + 64) {
    memcpy(to, from, bytes);
    return;
  }
  memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i*)to, _mm512_loadu_si512((const __m512i*)from));
#elif defined(__AVX2__)
    _mm256_stream_si256((__m256i*)to, _mm256_loadu_si256((const __m256i*)from));
    _mm256_stream_si256((__m256i*)(to + 32), _mm256_loadu_si256((const __m256i*)(from + 32)));
#else
    for (int i = 0; i < 64; i += 16) _mm_stream_si128((__m128i*)(to + i), _mm_loadu_si128((const __m128i*)(from + i)));
#endif
  }
  memcpy(to, from, bytes);
}
// Non-temporal stores are not ordered by a release store: they need this first.
void fence() { _mm_sfence(); }
#else
void stream(void* dst, const void* src, size_t bytes) { memcpy(dst, src, bytes); }
void fence() {}
#endif

#define MOONEP_ROW_KERNELS(name)                                     \
  {                                                                  \
      name,                                                          \
      stream,                                                        \
      fence,                                                         \
      {sum_rows<Float32>, sum_rows<BFloat16>, sum_rows<Float16>},    \
      {sum_parts<Float32>, sum_parts<BFloat16>, sum_parts<Float16>}, \
      {scale<Float32>, scale<BFloat16>, scale<Float16>},             \
      {dot<Float32>, dot<BFloat16>, dot<Float16>},                   \
  }

}  // namespace
}  // namespace moonep
