// The update rules: what each does to one parameter p and its slots, given its gradient g.
//
// A rule is a struct of the numbers in its formula, and an entry of `rules` below. The numbers come
// from pyps/core/rules.py by their names. Where weight_decay is not zero, g = g + weight_decay * p
// before all else, once per update.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include "kernel_update.h"
#include "kernels.h"

namespace pyps {
namespace {

// Declares a rule's numbers, each a float, and a list of their names.
#define PYPS_NUMBERS(...)                              \
  static constexpr const char* numbers = #__VA_ARGS__; \
  float __VA_ARGS__

struct Sgd {
  PYPS_NUMBERS(rate, weight_decay);

  void step(float g, float& p) const { p = p - rate * g; }
};

struct Momentum {
  PYPS_NUMBERS(rate, momentum, gradient_share, weight_decay);

  void step(float g, float& p, float& v) const {
    v = momentum * v + gradient_share * g;
    p = p - rate * v;
  }
};

struct HeavyBall {
  PYPS_NUMBERS(rate, momentum, weight_decay);

  void step(float g, float& p, float& v) const {
    v = momentum * v + rate * g;
    p = p - v;
  }
};

// The parameters are the look-ahead point, at which gradients are taken.
struct Nesterov {
  PYPS_NUMBERS(rate, momentum, weight_decay);

  void step(float g, float& p, float& v) const {
    v = momentum * v + g;
    p = p - rate * (g + momentum * v);
  }
};

// `ends` is 1 in the last of n updates, else 0; share is 1/n. With n = 1 the bits are Nesterov's.
struct DelayedNesterov {
  PYPS_NUMBERS(rate, momentum, share, ends, weight_decay);

  void step(float g, float& p, float& v, float& d) const {
    const bool last = ends != 0.0f;
    const float sum = d + g;
    const float velocity = momentum * v + share * sum;
    p = p - rate * (share * g + (last ? momentum * velocity : 0.0f));
    v = last ? velocity : v;
    d = last ? 0.0f : sum;
  }
};

// The quotient, or 0 for a divisor of 0. The division is made in any case: a branch would not
// vectorise.
inline float divided(float dividend, float divisor) {
  const float quotient = dividend / divisor;
  return divisor == 0.0f ? 0.0f : quotient;
}

// Dean et al. 2012, section 4.1. The sum includes the gradient at hand; eps stands outside the
// root.
//
// The divisor is zero only with eps = 0, for a gradient that is zero or whose square rounds to
// zero. Where g * g is too large for float32, a becomes infinite and the parameter stands still
// from then on. The next three rules treat divisors and large squares alike.
struct Adagrad {
  PYPS_NUMBERS(rate, eps, weight_decay);

  void step(float g, float& p, float& a) const {
    a = a + g * g;
    p = p - divided(rate * g, __builtin_sqrtf(a) + eps);
  }
};

struct Rmsprop {
  PYPS_NUMBERS(rate, decay, gradient_share, eps, weight_decay);

  void step(float g, float& p, float& s) const {
    s = decay * s + gradient_share * (g * g);
    p = p - divided(rate * g, __builtin_sqrtf(s) + eps);
  }
};

// Values that are used again are locals: the compiler cannot exclude that another array overlaps a
// moment in memory, and would load again what it has just stored.
template <class R>
inline void adam_step(const R& r, float g, float& p, float& m, float& v) {
  const float first = r.beta1 * m + r.gradient_share1 * g;
  const float second = r.beta2 * v + r.gradient_share2 * (g * g);
  m = first;
  v = second;
  p = p - divided(r.rate * first, __builtin_sqrtf(second) * r.root_scale + r.eps);
}

// The rate is divided by 1 - beta1^t, and root_scale is 1 / sqrt(1 - beta2^t), where t counts the
// updates with this one.
struct Adam {
  PYPS_NUMBERS(rate, beta1, gradient_share1, beta2, gradient_share2, root_scale, eps, weight_decay);

  void step(float g, float& p, float& m, float& v) const { adam_step(*this, g, p, m, v); }
};

// p = parameter_share * p, which no moment sees; then as Adam without decay. weight_decay is
// multiplied by the rate as it was before the division, and parameter_share is the rest of it.
struct Adamw {
  PYPS_NUMBERS(rate, beta1, gradient_share1, beta2, gradient_share2, root_scale, eps, weight_decay,
               parameter_share);

  void step(float g, float& p, float& m, float& v) const { adam_step(*this, g, p, m, v); }
};

// Returns the gradient after weight decay; AdamW's acts on the parameter itself.
template <class R>
inline float decayed(const R& r, float g, float& p) {
  return g + r.weight_decay * p;
}

inline float decayed(const Adamw& r, float g, float& p) {
  p = r.parameter_share * p;
  return g;
}

constexpr std::size_t num_names(const char* list) {
  std::size_t num = *list != '\0';
  for (; *list != '\0'; ++list) num += *list == ',';
  return num;
}

// An entry of the table; the compiler counts its names.
template <class R, class... Slot>
consteval Rule entry(const char* name, const char* slots,
                     void (R::*)(float, float&, Slot&...) const) {
  if (num_names(slots) != sizeof...(Slot)) throw "expected a name for each slot of the step";
  if (num_names(R::numbers) * sizeof(float) != sizeof(R)) throw "expected nothing but numbers";
  return {name, slots, R::numbers, update<R, 1 + sizeof...(Slot)>};
}

constexpr Rule rules[] = {
    entry("sgd", "", &Sgd::step),
    entry("momentum", "velocity", &Momentum::step),
    entry("heavy_ball", "velocity", &HeavyBall::step),
    entry("nesterov", "velocity", &Nesterov::step),
    entry("delayed_nesterov", "velocity, gradient_sum", &DelayedNesterov::step),
    entry("adagrad", "accumulator", &Adagrad::step),
    entry("rmsprop", "square_average", &Rmsprop::step),
    entry("adam", "first_moment, second_moment", &Adam::step),
    entry("adamw", "first_moment, second_moment", &Adamw::step),
};

}  // namespace
}  // namespace pyps
