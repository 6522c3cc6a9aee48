// SiTU-GLU, the activation of Kimi K3's experts (its technical report, Eq. 12), in the vectors of row_kernels_impl.h,
// which includes this:
//
//   out = b1 tanh(gate / b1) sigmoid(gate) * b2 tanh(up / b2),   b1 = 4, b2 = 25, so |out| <= 100
//
// Only sums, products, quotients and bits of single elements: every instruction set gives the same results.
#pragma once

namespace moonep {
namespace {

constexpr float kSituGateLimit = 4, kSituUpLimit = 25;

inline Words bits_of(Floats v) {
  Words bits;
  memcpy(&bits, &v, sizeof bits);
  return bits;
}

inline Floats floats_of(Words bits) {
  Floats v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

// Where `mask` is all ones: a, else b.
inline Floats choose(Words mask, Floats a, Floats b) { return floats_of((bits_of(a) & mask) | (bits_of(b) & ~mask)); }

struct Decay {
  Floats value, less_one;  // e^x, and e^x - 1 without cancellation
};

// For x <= 0 or NaN. x = n ln 2 + r with n whole, |r| <= ln 2 / 2; then e^x = 2^n + 2^n (e^r - 1). Within 1.5 ulp;
// values below the smallest normal number are 0.
inline Decay decay(Floats x) {
  const Floats least = Floats{} - 87.3f;
  const Words vanishes = (Words)(x < least);
  x = choose(vanishes, least, x);
  // Adding 1.5 * 2^23 rounds to a whole number, which stands in the lowest bits.
  const Floats shifted = x * 1.44269504f + 12582912.0f;
  const Floats n = shifted - 12582912.0f;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts; the first product is exact
  // The series of e^r: its first term left out is below a quarter ulp.
  Floats tail = r * (1.0f / 5040) + 1.0f / 720;
  tail = tail * r + 1.0f / 120;
  tail = tail * r + 1.0f / 24;
  tail = tail * r + 1.0f / 6;
  tail = tail * r + 0.5f;
  const Floats grown = tail * (r * r) + r;
  const Floats power = floats_of((bits_of(shifted) + 127) << 23);  // 2^n
  return {choose(vanishes, Floats{}, power + power * grown), power * grown + (power - 1.0f)};
}

constexpr uint32_t kSign = 0x80000000;

// tanh(|v| / limit) is -less_one / (less_one + 2), with e^x of x = -2 |v| / limit.
inline Decay saturation(Floats v, float factor) { return decay(floats_of(bits_of(v) | kSign) * factor); }

constexpr float kGateFactor = 2.0f / kSituGateLimit, kUpFactor = 2.0f / kSituUpLimit;
static_assert(kSituGateLimit == 4, "the square of the gate's e^x must be e^-|gate|, for its sigmoid");

// sigmoid(g) = over / (1 + e^-|g|), 1 - sigmoid(g) = under / (1 + e^-|g|).
struct Sigmoid {
  Floats over, under, divisor;
};

inline Sigmoid sigmoid(Floats gate, Floats root) {
  const Floats square = root * root, one = Floats{} + 1.0f;
  const Words negative = (Words)(gate < Floats{});
  return {choose(negative, square, one), choose(negative, one, square), square + 1.0f};
}

inline Floats situ_glu_of(Floats gate, Floats up) {
  const Decay g = saturation(gate, kGateFactor), u = saturation(up, kUpFactor);
  const Sigmoid s = sigmoid(gate, g.value);
  // Every factor of the first is at most its partner in the second, so the quotient is at most both limits' product.
  const Floats above = g.less_one * (kSituGateLimit * kSituUpLimit) * u.less_one * s.over;
  const Floats below = (g.less_one + 2.0f) * (u.less_one + 2.0f) * s.divisor;
  const Words sign = (bits_of(gate) ^ bits_of(up)) & kSign;
  return floats_of(bits_of(above / below) | sign);
}

struct GateUp {
  Floats gate, up;
};

inline GateUp situ_glu_backward_of(Floats gate, Floats up, Floats grad) {
  const Decay g = saturation(gate, kGateFactor), u = saturation(up, kUpFactor);
  const Sigmoid s = sigmoid(gate, g.value);
  const Floats g_divisor = g.less_one + 2.0f, u_divisor = u.less_one + 2.0f;
  const Floats g_tanh = floats_of(bits_of(-g.less_one / g_divisor) | (bits_of(gate) & kSign));
  const Floats u_tanh = floats_of(bits_of(-u.less_one / u_divisor) | (bits_of(up) & kSign));
  // 1 - tanh^2, without cancellation.
  const Floats g_slope = g.value * 4.0f / (g_divisor * g_divisor), u_slope = u.value * 4.0f / (u_divisor * u_divisor);
  const Floats on = s.over / s.divisor, off = s.under / s.divisor;
  const Floats gated = g_tanh * kSituGateLimit * on;
  return {grad * (u_tanh * kSituUpLimit) * (g_slope * on + gated * off), grad * gated * u_slope};
}

template <typename T>
void situ_glu(void* out_void, const void* gate_up, int64_t n) {
  typename T::Element* out = (typename T::Element*)out_void;
  const typename T::Element *gate = (const typename T::Element*)gate_up, *up = gate + n;
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) T::store(out + j, situ_glu_of(T::load(gate + j), T::load(up + j)));
  const int64_t rest = n - j;
  if (rest > 0) store_some<T>(out + j, situ_glu_of(load_some<T>(gate + j, rest), load_some<T>(up + j, rest)), rest);
}

template <typename T>
void situ_glu_backward(void* grad_gate_up, const void* gate_up, const void* grad_void, int64_t n) {
  typename T::Element *grad_gate = (typename T::Element*)grad_gate_up, *grad_up = grad_gate + n;
  const typename T::Element *gate = (const typename T::Element*)gate_up, *up = gate + n;
  const typename T::Element* grad = (const typename T::Element*)grad_void;
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    const GateUp found = situ_glu_backward_of(T::load(gate + j), T::load(up + j), T::load(grad + j));
    T::store(grad_gate + j, found.gate);
    T::store(grad_up + j, found.up);
  }
  const int64_t rest = n - j;
  if (rest > 0) {
    const GateUp found =
        situ_glu_backward_of(load_some<T>(gate + j, rest), load_some<T>(up + j, rest), load_some<T>(grad + j, rest));
    store_some<T>(grad_gate + j, found.gate, rest);
    store_some<T>(grad_up + j, found.up, rest);
  }
}

}  // namespace
}  // namespace moonep
