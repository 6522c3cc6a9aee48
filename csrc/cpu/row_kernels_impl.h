// The row kernels, written once in vectors of the instruction set that the including file is compiled for. Everything
// here has internal linkage. Elements never mix but in `dot`, so the width changes no result; `dot` keeps its own
// order.
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

#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kVectors = 8;
#else
constexpr int kLanes = 4, kVectors = 8;
#endif
constexpr int kColumns = kLanes * kVectors;  // what a sum keeps in registers

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2)));

// ---- dtypes: load kLanes elements as fp32, store them rounded to nearest even ----

struct Float32 {
  typedef float Element;
  static Floats load(const Element* p) { return *reinterpret_cast<const Floats*>(p); }
  static void store(Element* p, Floats v) { *reinterpret_cast<Floats*>(p) = v; }
};

struct BFloat16 {
  typedef uint16_t Element;
  static Floats load(const Element* p) {
    const Words bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words) << 16;
    Floats v;
    memcpy(&v, &bits, sizeof v);
    return v;
  }
  static void store(Element* p, Floats v) {
    Words bits;
    memcpy(&bits, &v, sizeof bits);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words is_nan = (Words)(v != v);
    *reinterpret_cast<Halves*>(p) = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), Halves);
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
  static Floats load(const Element* p) {
    Floats v;
#if defined(__AVX512F__)
    const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    memcpy(&v, &wide, sizeof v);
#elif defined(__F16C__)
    const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
    memcpy(&v, &wide, sizeof v);
#elif defined(__aarch64__)
    const float32x4_t wide = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
    memcpy(&v, &wide, sizeof v);
#else
    for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(p[i]);
#endif
    return v;
  }
  static void store(Element* p, Floats v) {
#if defined(__AVX512F__)
    __m512 wide;
    memcpy(&wide, &v, sizeof wide);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    __m256 wide;
    memcpy(&wide, &v, sizeof wide);
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    float32x4_t wide;
    memcpy(&wide, &v, sizeof wide);
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(wide)));
#else
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(v[i]);
#endif
  }
};

// The last, narrower step of a row goes through a padded copy.
template <typename T>
Floats load_some(const typename T::Element* p, int64_t count) {
  typename T::Element padded[kLanes] = {};
  memcpy(padded, p, count * sizeof(*p));
  return T::load(padded);
}

template <typename T>
void store_some(typename T::Element* p, Floats v, int64_t count) {
  typename T::Element padded[kLanes];
  T::store(padded, v);
  memcpy(p, padded, count * sizeof(*p));
}

// Rows are read side by side, which the CPU's own prefetcher does not follow far.
constexpr size_t kAhead = 512;
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// The next columns but some of a row that is read from `p` on.
template <typename Element>
inline void prefetch_ahead(const Element* p) {
  for (size_t at = 0; at < kColumns * sizeof(Element); at += 64) prefetch((const char*)p + kAhead + at);
}

// ---- sums ----

// Columns [j, j + kColumns) of the rows, weighted, summed in order from +0, left in registers.
template <typename T>
inline void sum_columns(Floats* sums, const void* const* rows, const float* weights, int64_t count, int64_t j) {
  Floats acc[kVectors];
  for (int v = 0; v < kVectors; ++v) acc[v] = Floats{};
  for (int64_t i = 0; i < count; ++i) {
    const typename T::Element* row = (const typename T::Element*)rows[i] + j;
    prefetch_ahead(row);
    if (weights) {
      const float weight = weights[i];
      for (int v = 0; v < kVectors; ++v) acc[v] += T::load(row + v * kLanes) * weight;
    } else {
      for (int v = 0; v < kVectors; ++v) acc[v] += T::load(row + v * kLanes);
    }
  }
  for (int v = 0; v < kVectors; ++v) sums[v] = acc[v];
}

template <typename T>
inline Floats sum_some(const void* const* rows, const float* weights, int64_t count, int64_t j, int64_t valid) {
  Floats acc = {};
  for (int64_t i = 0; i < count; ++i) {
    const Floats row = load_some<T>((const typename T::Element*)rows[i] + j, valid);
    acc += weights ? row * weights[i] : row;
  }
  return acc;
}

template <typename T>
void sum_rows(void* dst_void, const void* const* rows, const float* weights, int64_t count, int64_t n,
              bool payload_wire) {
  float* wide = (float*)dst_void;
  typename T::Element* narrow = (typename T::Element*)dst_void;
  int64_t j = 0;
  for (; j + kColumns <= n; j += kColumns) {
    Floats sums[kVectors];
    sum_columns<T>(sums, rows, weights, count, j);
    for (int v = 0; v < kVectors; ++v) {
      if (payload_wire) {
        T::store(narrow + j + v * kLanes, sums[v]);
      } else {
        Float32::store(wide + j + v * kLanes, sums[v]);
      }
    }
  }
  for (; j < n; j += kLanes) {
    const int64_t valid = n - j < kLanes ? n - j : kLanes;
    const Floats sum = sum_some<T>(rows, weights, count, j, valid);
    if (payload_wire) {
      store_some<T>(narrow + j, sum, valid);
    } else {
      store_some<Float32>(wide + j, sum, valid);
    }
  }
}

// A sum as it comes out of the wire.
template <typename T>
inline Floats rounded(Floats v) {
  typename T::Element elements[kLanes];
  T::store(elements, v);
  return T::load(elements);
}

template <typename T>
void sum_parts(void* dst_void, const Part* parts, int64_t count, int64_t n, bool payload_wire) {
  typename T::Element* dst = (typename T::Element*)dst_void;
  int64_t j = 0;
  for (; j + kColumns <= n; j += kColumns) {
    Floats total[kVectors] = {}, host[kVectors] = {};
    for (int64_t p = 0; p < count; ++p) {
      const Part& part = parts[p];
      if (part.opens_host) {
        for (int v = 0; v < kVectors; ++v) {
          total[v] += host[v];
          host[v] = Floats{};
        }
      }
      if (!part.sum) {
        Floats sums[kVectors];
        sum_columns<T>(sums, part.rows, part.weights, part.count, j);
        for (int v = 0; v < kVectors; ++v) host[v] += payload_wire ? rounded<T>(sums[v]) : sums[v];
      } else if (payload_wire) {
        const typename T::Element* sum = (const typename T::Element*)part.sum + j;
        prefetch_ahead(sum);
        for (int v = 0; v < kVectors; ++v) host[v] += T::load(sum + v * kLanes);
      } else {
        const float* sum = (const float*)part.sum + j;
        prefetch_ahead(sum);
        for (int v = 0; v < kVectors; ++v) host[v] += Float32::load(sum + v * kLanes);
      }
    }
    for (int v = 0; v < kVectors; ++v) T::store(dst + j + v * kLanes, total[v] + host[v]);
  }
  for (; j < n; j += kLanes) {
    const int64_t valid = n - j < kLanes ? n - j : kLanes;
    Floats total = {}, host = {};
    for (int64_t p = 0; p < count; ++p) {
      const Part& part = parts[p];
      if (part.opens_host) {
        total += host;
        host = Floats{};
      }
      if (!part.sum) {
        const Floats sum = sum_some<T>(part.rows, part.weights, part.count, j, valid);
        host += payload_wire ? rounded<T>(sum) : sum;
      } else if (payload_wire) {
        host += load_some<T>((const typename T::Element*)part.sum + j, valid);
      } else {
        host += load_some<Float32>((const float*)part.sum + j, valid);
      }
    }
    store_some<T>(dst + j, total + host, valid);
  }
}

template <typename T>
void scale(void* dst_void, const void* src_void, float weight, int64_t n) {
  typename T::Element* dst = (typename T::Element*)dst_void;
  const typename T::Element* src = (const typename T::Element*)src_void;
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) T::store(dst + j, T::load(src + j) * weight);
  if (j < n) store_some<T>(dst + j, load_some<T>(src + j, n - j) * weight, n - j);
}

// Element j is added into place j % 32, whatever the width of a vector; then the places are added up.
template <typename T>
float dot(const void* a_void, const void* b_void, int64_t n) {
  constexpr int kPlaces = 32, kParts = kPlaces / kLanes;
  const typename T::Element* a = (const typename T::Element*)a_void;
  const typename T::Element* b = (const typename T::Element*)b_void;
  Floats acc[kParts] = {};
  int64_t j = 0;
  for (; j + kPlaces <= n; j += kPlaces) {
    prefetch((const char*)(a + j) + kAhead);
    for (int v = 0; v < kParts; ++v) acc[v] += T::load(a + j + v * kLanes) * T::load(b + j + v * kLanes);
  }
  for (int v = 0; j < n; j += kLanes, ++v) {
    const int64_t valid = n - j < kLanes ? n - j : kLanes;
    acc[v] += load_some<T>(a + j, valid) * load_some<T>(b + j, valid);
  }
  float total = 0;
  for (int v = 0; v < kParts; ++v)
    for (int i = 0; i < kLanes; ++i) total += acc[v][i];
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

}  // namespace
}  // namespace moonep

#include "cpu/situ_impl.h"

#define MOONEP_ROW_KERNELS(name)                                                             \
  {                                                                                          \
      name,                                                                                  \
      stream,                                                                                \
      fence,                                                                                 \
      {sum_rows<Float32>, sum_rows<BFloat16>, sum_rows<Float16>},                            \
      {sum_parts<Float32>, sum_parts<BFloat16>, sum_parts<Float16>},                         \
      {scale<Float32>, scale<BFloat16>, scale<Float16>},                                     \
      {dot<Float32>, dot<BFloat16>, dot<Float16>},                                           \
      {situ_glu<Float32>, situ_glu<BFloat16>, situ_glu<Float16>},                            \
      {situ_glu_backward<Float32>, situ_glu_backward<BFloat16>, situ_glu_backward<Float16>}, \
  }
