// Compiled once per instruction set; see kernels.h and kernel_rules.h for what each loop
// computes.
//
// The build defines PYPS_ISA_NAME ("avx2") and PYPS_KERNELS (kernels_avx2). Everything but the
// table is local to this file and the kernel_*.h that it includes, and no standard-library function
// is called: a weak symbol compiled with wider instructions could otherwise be the one that the
// linker picks for everybody.
//
// `scripts/check_vectorised.py` requires that the compiler vectorised every loop marked
// "Vectorised".

#include "kernels.h"

#include <cstdint>

#include "kernel_codecs.h"
#include "kernel_finite.h"
#include "kernel_memory.h"
#include "kernel_reply.h"
#include "kernel_rows.h"
#include "kernel_rules.h"
#include "kernel_vectors.h"

namespace pyps {
namespace {

std::ptrdiff_t first_non_finite(const void* gradient, Codec codec, std::size_t count) {
  return with_codec(codec, [=](auto c) {
    return first_non_finite_in<decltype(c)>(static_cast<const Byte*>(gradient), count);
  });
}

void decode(float* values, const void* encoded, Codec codec, std::size_t count) {
  with_codec(codec, [=](auto c) {
    decode_all<decltype(c)>(values, static_cast<const Byte*>(encoded), count);
  });
}

void encode(void* encoded, const float* values, Codec codec, std::size_t count) {
  ReplyWriter writer({encoded, codec}, count);
  for (std::size_t start = 0; start < count; start += block_max) {
    const std::size_t left = count - start;
    writer.write(values + start, left < block_max ? left : block_max);
  }
  writer.finish();
}

// Element i always belongs to lane i modulo 16, whatever the width of a vector: the sum has one
// order of additions, hence one value, on every instruction set.
struct Lanes {
  double sums[num_lanes] = {};
  float minima[num_lanes];
  float maxima[num_lanes];

  Lanes() {
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      minima[lane] = __builtin_inff();
      maxima[lane] = -__builtin_inff();
    }
  }

  void add(const float* __restrict values, std::size_t count) {
    for (std::size_t lane = 0; lane < count; ++lane) {
      const float value = values[lane];
      sums[lane] += double{value} * double{value};
      minima[lane] = value < minima[lane] ? value : minima[lane];
      maxima[lane] = value > maxima[lane] ? value : maxima[lane];
    }
  }
};

Summary summary(const float* values, std::size_t count) {
  Lanes lanes;
  const std::size_t whole = count - count % num_lanes;
  for (std::size_t start = 0; start < whole; start += num_lanes) {
    lanes.add(values + start, num_lanes);
  }
  lanes.add(values + whole, count - whole);

  Summary result = {0.0, __builtin_inff(), -__builtin_inff()};
  for (std::size_t lane = 0; lane < num_lanes; ++lane) {
    result.sum_of_squares += lanes.sums[lane];
    result.min = lanes.minima[lane] < result.min ? lanes.minima[lane] : result.min;
    result.max = lanes.maxima[lane] > result.max ? lanes.maxima[lane] : result.max;
  }
  return result;
}

template <class... Float>
void bandwidth_loop(const Byte* __restrict gradient, std::size_t count,
                    Float* __restrict... arrays) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    const float g = Float32::decode(load<Float32>(gradient, i));
    ((arrays[i] = arrays[i] + g), ...);
  }
}

void bandwidth(float* const* arrays, std::size_t num_arrays, const void* gradient,
               std::size_t count) {
  const Byte* words = static_cast<const Byte*>(gradient);
  if (num_arrays == 1) bandwidth_loop(words, count, arrays[0]);
  if (num_arrays == 2) bandwidth_loop(words, count, arrays[0], arrays[1]);
  if (num_arrays == 3) bandwidth_loop(words, count, arrays[0], arrays[1], arrays[2]);
}

}  // namespace

extern const Kernels PYPS_KERNELS;
const Kernels PYPS_KERNELS = {
    .isa = PYPS_ISA_NAME,
    .codecs = Codecs::traits,
    .num_codecs = sizeof Codecs::traits / sizeof *Codecs::traits,
    .rules = rules,
    .num_rules = sizeof rules / sizeof *rules,
    .first_non_finite = first_non_finite,
    .decode = decode,
    .encode = encode,
    .summary = summary,
    .bandwidth = bandwidth,
    .vectors =
        {
            .move = move_vector,
            .dot = dot,
            .norm1 = norm1,
            .norm_inf = norm_inf,
            .combine = combine,
            .gram = gram,
        },
    .rows =
        {
            .rules = row_rules,
            .num_rules = sizeof row_rules / sizeof *row_rules,
            .initial = initial_row,
            .round = round_row,
        },
};

}  // namespace pyps
