// What each rule does to one parameter and its slots, given its gradient; see kernels.h.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include "kernels.h"

namespace pyps {
namespace {

inline void step(const SgdOptions& o, float g, float& p) { p = p - o.rate * g; }

inline void step(const MomentumOptions& o, float g, float& p, float& v) {
  v = o.momentum * v + o.gradient_share * g;
  p = p - o.rate * v;
}

inline void step(const HeavyBallOptions& o, float g, float& p, float& v) {
  v = o.momentum * v + o.rate * g;
  p = p - v;
}

inline void step(const NesterovOptions& o, float g, float& p, float& v) {
  v = o.momentum * v + g;
  p = p - o.rate * (g + o.momentum * v);
}

// Computed for every parameter, and thrown away where there is nothing to divide by: a branch would
// not vectorise.
inline float divided(float dividend, float divisor) {
  const float quotient = dividend / divisor;
  return divisor == 0.0f ? 0.0f : quotient;
}

inline void step(const AdagradOptions& o, float g, float& p, float& a) {
  a = a + g * g;
  p = p - divided(o.rate * g, __builtin_sqrtf(a) + o.eps);
}

inline void step(const RmspropOptions& o, float g, float& p, float& s) {
  s = o.decay * s + o.gradient_share * (g * g);
  p = p - divided(o.rate * g, __builtin_sqrtf(s) + o.eps);
}

inline void step(const AdamOptions& o, float g, float& p, float& m, float& v) {
  m = o.beta1 * m + o.gradient_share1 * g;
  v = o.beta2 * v + o.gradient_share2 * (g * g);
  p = p - divided(o.rate * m, __builtin_sqrtf(v) * o.root_scale + o.eps);
}

// Returns the gradient after weight decay; AdamW's acts on the parameter itself.
template <class Options>
inline float decayed(const Options& o, float g, float& p) {
  return g + o.weight_decay * p;
}

inline float decayed(const AdamwOptions& o, float g, float& p) {
  p = o.parameter_share * p;
  return g;
}

}  // namespace
}  // namespace pyps
