// The loops over vectors that lie on the servers; see vectors.h for what each computes.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include <cstddef>

#include "kernel_memory.h"
#include "vectors.h"

namespace pyps {
namespace {

// The iterations of the loop behind it do not depend on each other.
#ifdef __clang__
#define PYPS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PYPS_INDEPENDENT _Pragma("GCC ivdep")
#endif

void move_vector(float* z, const float* x, double a, const float* y, std::size_t count) {
  // z may be x or y itself; without the pragma the compiler would compare the addresses first.
  PYPS_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    z[i] = static_cast<float>(double{x[i]} + a * double{y[i]});
  }
}

inline double sum_of_lanes(const double* lanes) {
  double sum = 0.0;
  for (std::size_t lane = 0; lane < num_lanes; ++lane) sum += lanes[lane];
  return sum;
}

template <class Function, class... X>
double lane_loop(std::size_t count, Function function, const X*... x) {
  double lanes[num_lanes] = {};
  const std::size_t whole = count - count % num_lanes;
  for (std::size_t start = 0; start < whole; start += num_lanes) {  // Vectorised.
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      lanes[lane] += function(double{x[start + lane]}...);
    }
  }
  for (std::size_t i = whole; i < count; ++i) lanes[i - whole] += function(double{x[i]}...);
  return sum_of_lanes(lanes);
}

double dot(const float* x, const float* y, std::size_t count) {
  return lane_loop(count, [](double one, double other) { return one * other; }, x, y);
}

double norm1(const float* x, std::size_t count) {
  return lane_loop(count, [](double value) { return __builtin_fabs(value); }, x);
}

double norm_inf(const float* x, std::size_t count) {
  float largest[num_lanes] = {};
  // No comparison is true of NaN, which `largest` passes over.
  float not_a_number[num_lanes] = {};
  const std::size_t whole = count - count % num_lanes;
  const auto look = [&](std::size_t lane, float value) {
    const float magnitude = value < 0 ? -value : value;
    largest[lane] = magnitude > largest[lane] ? magnitude : largest[lane];
    not_a_number[lane] = value == value ? not_a_number[lane] : value;
  };
  for (std::size_t start = 0; start < whole; start += num_lanes) {
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {  // Vectorised.
      look(lane, x[start + lane]);
    }
  }
  for (std::size_t i = whole; i < count; ++i) look(i - whole, x[i]);
  float found = 0;
  for (std::size_t lane = 0; lane < num_lanes; ++lane) {
    if (not_a_number[lane] != not_a_number[lane]) return not_a_number[lane];
    found = largest[lane] > found ? largest[lane] : found;
  }
  return found;
}

// Elements that are summed over all terms before the next ones: they stay in the nearest cache.
constexpr std::size_t combine_block_max = 256;

// Prefetches what a loop over blocks of many vectors will read next of this one: processors do not
// foresee it, and the nearest cache is too small for the next blocks of all.
inline void prefetch_block(const float* x, std::size_t count) {
  prefetch<in_outer_caches>(x, block_distance, count * sizeof(float));
}

inline void add_term(double* __restrict sums, const float* __restrict x, double scalar,
                     std::size_t count) {
  prefetch_block(x, count);
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    sums[i] = sums[i] + scalar * double{x[i]};
  }
}

inline void store_quotients(float* __restrict z, const double* __restrict sums, double divisor,
                            std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    z[i] = static_cast<float>(sums[i] / divisor);
  }
}

void combine(float* z, const Term* terms, std::size_t num, double divisor, std::size_t count) {
  double sums[combine_block_max];
  for (std::size_t start = 0; start < count; start += combine_block_max) {
    const std::size_t left = count - start;
    const std::size_t block = left < combine_block_max ? left : combine_block_max;
    for (std::size_t i = 0; i < block; ++i) sums[i] = 0.0;
    for (std::size_t index = 0; index < num; ++index) {
      add_term(sums, terms[index].vector + start, terms[index].scalar, block);
    }
    store_quotients(z + start, sums, divisor, block);
  }
}

inline void widen(double* __restrict wide, const float* __restrict x, std::size_t count) {
  prefetch_block(x, count);
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    wide[i] = double{x[i]};
  }
}

inline void add_products(double* __restrict lanes, const double* x, const double* y,
                         std::size_t count) {
  for (std::size_t start = 0; start < count; start += num_lanes) {  // Vectorised.
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      lanes[lane] += x[start + lane] * y[start + lane];
    }
  }
}

void gram(double* sums, const Pair* pairs, std::size_t num_pairs, const float* const* vectors,
          std::size_t num_vectors, std::size_t count, double* scratch) {
  double* blocks = scratch;
  double* lanes = scratch + num_vectors * gram_block_max;
  for (std::size_t i = 0; i < num_pairs * num_lanes; ++i) lanes[i] = 0.0;
  for (std::size_t start = 0; start < count; start += gram_block_max) {
    const std::size_t left = count - start;
    const std::size_t block = left < gram_block_max ? left : gram_block_max;
    // The last block is filled up with zeros: no lane is ever -0, so adding 0 changes none.
    const std::size_t filled = block + (num_lanes - block % num_lanes) % num_lanes;
    for (std::size_t v = 0; v < num_vectors; ++v) {
      double* wide = blocks + v * gram_block_max;
      widen(wide, vectors[v] + start, block);
      for (std::size_t i = block; i < filled; ++i) wide[i] = 0.0;
    }
    for (std::size_t k = 0; k < num_pairs; ++k) {
      add_products(lanes + k * num_lanes, blocks + pairs[k].left * gram_block_max,
                   blocks + pairs[k].right * gram_block_max, filled);
    }
  }
  for (std::size_t k = 0; k < num_pairs; ++k) sums[k] = sum_of_lanes(lanes + k * num_lanes);
}

}  // namespace
}  // namespace pyps
