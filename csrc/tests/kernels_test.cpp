#include "kernels.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "isa.h"

namespace {

using pyps::Codec;

constexpr Codec codecs[] = {Codec::float32, Codec::float16, Codec::bfloat16};
constexpr std::size_t lengths[] = {0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 255, 4097, 9999};

// `size` bytes at a given distance from an aligned address, with nothing readable behind the last.
class Payload {
 public:
  Payload(std::size_t size, std::size_t offset)
      : block_(new unsigned char[offset + size]), offset_(offset) {}
  unsigned char* data() { return block_.get() + offset_; }

 private:
  std::unique_ptr<unsigned char[]> block_;
  std::size_t offset_;
};

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-2.0f, 2.0f);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(random);
  values.shrink_to_fit();
  return values;
}

bool same_bits(const std::vector<float>& left, const std::vector<float>& right) {
  return left.size() == right.size() &&
         (left.empty() || std::memcmp(left.data(), right.data(), left.size() * 4) == 0);
}

// One element, in the terms of the header's formula.
void adagrad_reference(float* p, float* a, float g, float rate, float eps) {
  volatile float square = g * g;  // No fused multiply-add, whatever the compiler's default.
  *a = *a + square;
  const float denominator = std::sqrt(*a) + eps;
  volatile float scaled = rate * g;
  volatile float step = scaled / denominator;
  if (denominator != 0) *p = *p - step;
}

void test_rules(Codec codec, std::size_t count, std::size_t offset) {
  const pyps::Kernels& kernels = pyps::kernels();
  const std::size_t size = count * size_of(codec);
  const std::vector<float> parameters = random_values(count, 1);
  const std::vector<float> values = random_values(count, 2);
  Payload gradient(size, offset);
  kernels.encode(gradient.data(), values.data(), codec, count);

  std::vector<float> decoded(count);
  kernels.decode(decoded.data(), gradient.data(), codec, count);
  Payload again(size, (offset + 3) % 8);
  kernels.encode(again.data(), decoded.data(), codec, count);
  CHECK(size == 0 || std::memcmp(again.data(), gradient.data(), size) == 0);

  std::vector<float> p = parameters;
  std::vector<float> a(count, 0.0f);
  std::vector<float> p_expected = parameters;
  std::vector<float> a_expected = a;
  for (const float eps : {1e-10f, 0.0f}) {
    kernels.adagrad(p.data(), a.data(), gradient.data(), codec, count, {.rate = 0.1f, .eps = eps});
    for (std::size_t i = 0; i < count; ++i) {
      adagrad_reference(&p_expected[i], &a_expected[i], decoded[i], 0.1f, eps);
    }
    CHECK(same_bits(p, p_expected));
    CHECK(same_bits(a, a_expected));
  }

  p = parameters;
  kernels.sgd(p.data(), gradient.data(), codec, count, {.rate = 0.1f});
  for (std::size_t i = 0; i < count; ++i) {
    volatile float step = 0.1f * decoded[i];
    p_expected[i] = parameters[i] - step;
  }
  CHECK(same_bits(p, p_expected));

  if (codec == Codec::float32) {
    p = parameters;
    a = values;
    kernels.bandwidth(p.data(), a.data(), gradient.data(), count);
    for (std::size_t i = 0; i < count; ++i) CHECK(a[i] == values[i] + decoded[i]);
  }
}

void test_guard(Codec codec, std::size_t count, std::size_t offset) {
  const pyps::Kernels& kernels = pyps::kernels();
  std::vector<float> values = random_values(count, 3);
  Payload gradient(count * size_of(codec), offset);
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
          test_rules(codec, count, offset);
          test_guard(codec, count, offset);
        }
      }
      test_summary(count);
    }
    test_every_16_bit_pattern();
  }
}
