#include "kernels.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "isa.h"
#include "values.h"

namespace {

void test_codec(Codec codec, std::size_t count, std::size_t offset) {
  const pyps::Kernels& kernels = pyps::kernels();
  const std::size_t size = bytes_of(codec, count);
  const std::vector<float> values = random_values(count, 2);
  Payload gradient(size, offset);
  kernels.encode(gradient.data(), values.data(), codec, count);

  std::vector<float> decoded(count);
  kernels.decode(decoded.data(), gradient.data(), codec, count);
  Payload again(size, (offset + 3) % 8);
  kernels.encode(again.data(), decoded.data(), codec, count);
  CHECK(size == 0 || std::memcmp(again.data(), gradient.data(), size) == 0);
}

void test_guard(Codec codec, std::size_t count, std::size_t offset) {
  const pyps::Kernels& kernels = pyps::kernels();
  std::vector<float> values = random_values(count, 3);
  Payload gradient(bytes_of(codec, count), offset);
  kernels.encode(gradient.data(), values.data(), codec, count);
  CHECK(kernels.first_non_finite(gradient.data(), codec, count) == -1);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    for (const std::size_t index : {std::size_t{0}, count / 2, count - 1}) {
      if (index >= count) continue;
      std::vector<float> broken = values;
      broken[index] = bad;
      broken[count - 1] = bad;
      kernels.encode(gradient.data(), broken.data(), codec, count);
      CHECK(kernels.first_non_finite(gradient.data(), codec, count) ==
            static_cast<std::ptrdiff_t>(index));
    }
  }
}

void test_every_16_bit_pattern() {
  const pyps::Kernels& kernels = pyps::kernels();
  for (const Codec codec : {Codec::float16, Codec::bfloat16}) {
    std::vector<std::uint16_t> patterns(65536);
    for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<std::uint16_t>(i);
    std::vector<float> values(patterns.size());
    kernels.decode(values.data(), patterns.data(), codec, patterns.size());
    std::vector<std::uint16_t> again(patterns.size());
    kernels.encode(again.data(), values.data(), codec, values.size());
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      CHECK(std::isnan(values[i]) || again[i] == patterns[i]);
    }
  }
}

void test_summary(std::size_t count) {
  const pyps::Kernels& kernels = pyps::kernels();
  const std::vector<float> values = random_values(count, 4);
  double sum = 0;
  float low = std::numeric_limits<float>::infinity();
  float high = -low;
  for (const float value : values) {
    sum += double{value} * double{value};
    low = std::fmin(low, value);
    high = std::fmax(high, value);
  }
  const pyps::Summary summary = kernels.summary(values.data(), count);
  CHECK(std::fabs(summary.sum_of_squares - sum) <= 1e-12 * sum);
  CHECK(summary.min == low && summary.max == high);
}

}  // namespace

void test_kernels() {
  for (const std::string& isa : pyps::available_isas()) {
    pyps::select_isa(isa);
    for (const std::size_t count : lengths) {
      for (const Codec codec : codecs) {
        for (std::size_t offset = 0; offset < 8; ++offset) {
          test_codec(codec, count, offset);
          test_guard(codec, count, offset);
        }
      }
      test_summary(count);
    }
    test_every_16_bit_pattern();
  }
}
