// Every kernel, over arrays with nothing behind their last byte, at any distance from an aligned
// address. The tests of the module pyps._kernels compare what they compute.

#include "kernels.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "isa.h"
#include "values.h"

namespace {

constexpr Codec codecs[] = {Codec::float32, Codec::float16, Codec::bfloat16,
                            Codec::int8,    Codec::int4,    Codec::onebit};
constexpr std::size_t lengths[] = {0,  1,  2,  3,  5,  7,   8,    9,    15,   16,
                                   17, 31, 32, 33, 63, 255, 1024, 1025, 4097, 9999};
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

Payload encoded(Codec codec, std::vector<float> values, std::size_t offset) {
  Payload payload(bytes_of(codec, values.size()), offset);
  pyps::kernels().encode(payload.data(), values.data(), codec, values.size());
  return payload;
}

void test_codec(Codec codec, std::size_t count, std::size_t offset) {
  const pyps::Kernels& kernels = pyps::kernels();
  std::vector<float> values = random_values(count, 2);
  Payload payload = encoded(codec, values, offset);
  CHECK(kernels.first_non_finite(payload.data(), codec, count) == -1);
  kernels.decode(values.data(), payload.data(), codec, count);
  if (count == 0) return;
  values.back() = nan;
  CHECK(kernels.first_non_finite(encoded(codec, values, offset).data(), codec, count) >= 0);
}

void test_rule(const pyps::Rule& rule, Codec codec, std::size_t count, std::size_t offset) {
  Payload first = encoded(codec, random_values(count, 1), offset);
  Payload second = encoded(codec, random_values(count, 2), (offset + 3) % 8);
  const pyps::Gradient gradients[] = {{first.data(), codec, 0.5f}, {second.data(), codec, 0.3f}};
  Payload reply(bytes_of(codec, count), (offset + 5) % 8);
  const std::string_view names = rule.numbers;
  const auto num = static_cast<std::size_t>(std::count(names.begin(), names.end(), ',')) + 1;
  std::vector<std::vector<float>> rows(3, random_values(count, 3));
  float* const arrays[] = {rows[0].data(), rows[1].data(), rows[2].data()};
  // Rules without decay have a loop of their own.
  for (const std::vector<float>& numbers : {std::vector<float>(num), std::vector(num, 0.5f)}) {
    for (std::size_t sum = 1; sum <= 2; ++sum) {
      for (const bool guarded : {false, true}) {
        CHECK(rule.update(arrays, {gradients, sum, guarded}, {reply.data(), codec}, count,
                          numbers.data()) == 0);
      }
    }
  }
}

std::size_t sgd(const pyps::Gradient& gradient, bool guarded, pyps::Reply reply,
                std::size_t count) {
  const pyps::Kernels& kernels = pyps::kernels();
  const auto* end = kernels.rules + kernels.num_rules;
  const auto* rule = std::find_if(kernels.rules, end,
                                  [](auto& each) { return std::string_view(each.name) == "sgd"; });
  CHECK(rule != end);
  std::vector<float> parameters = random_values(count, 1);
  const float numbers[] = {0.1f, 0.0f};
  float* const arrays[] = {parameters.data()};
  return rule->update(arrays, {&gradient, 1, guarded}, reply, count, numbers);
}

// Replies so long that they go past the caches, at every place in a line of memory.
void test_long_reply(Codec codec) {
  const std::size_t count = 300'077;
  const std::vector<float> gradient = random_values(count, 2);
  for (std::size_t offset = 0; offset < 65; ++offset) {
    Payload reply(bytes_of(codec, count), offset);
    sgd({gradient.data(), Codec::float32, 1.0f}, offset % 2 == 1, {reply.data(), codec}, count);
  }
}

void test_left_out(Codec codec, std::size_t count) {
  std::vector<float> values(count, 1.0f);
  values.back() = nan;
  Payload broken = encoded(codec, values, 3);
  CHECK(sgd({broken.data(), codec, 1.0f}, true, {}, count) == (count - 1) % 1024 + 1);
}

void test_arrays(std::size_t count) {
  const pyps::Kernels& kernels = pyps::kernels();
  const pyps::VectorKernels& vectors = kernels.vectors;
  std::vector<std::vector<float>> rows;
  std::vector<float*> arrays;
  std::vector<pyps::Term> terms;
  std::vector<pyps::Pair> pairs;
  for (std::size_t k = 0; k < 9; ++k) {
    rows.push_back(random_values(count, static_cast<unsigned>(k)));
    arrays.push_back(rows.back().data());
    terms.push_back({.scalar = 0.5, .vector = arrays.back()});
    for (std::size_t left = 0; left <= k; ++left) pairs.push_back({left, k});
  }
  for (std::size_t num = 1; num <= 3; ++num) {
    kernels.bandwidth(arrays.data(), num, rows[3].data(), count);
  }
  kernels.summary(arrays[0], count);
  vectors.move(arrays[0], arrays[1], 0.5, arrays[0], count);
  for (const std::size_t num : {0u, 1u, 9u}) {
    vectors.combine(arrays[2], terms.data(), num, 7.0, count);
  }
  vectors.norm1(arrays[0], count);
  vectors.norm_inf(arrays[0], count);
  std::vector<double> sums(pairs.size());
  std::vector<double> scratch(pyps::gram_scratch_count(rows.size(), pairs.size()));
  vectors.gram(sums.data(), pairs.data(), pairs.size(), arrays.data(), rows.size(), count,
               scratch.data());
  CHECK(sums[1] == vectors.dot(arrays[0], arrays[1], count));
}

}  // namespace

void test_kernels() {
  for (const std::string& isa : pyps::available_isas()) {
    pyps::select_isa(isa);
    const pyps::Kernels& kernels = pyps::kernels();
    for (const Codec codec : codecs) {
      test_long_reply(codec);
      for (const std::size_t count : {1u, 1024u, 2000u}) test_left_out(codec, count);
    }
    for (const std::size_t count : lengths) {
      test_arrays(count);
      for (const Codec codec : codecs) {
        for (std::size_t offset = 0; offset < 8; ++offset) {
          test_codec(codec, count, offset);
          for (std::size_t i = 0; i < kernels.num_rules; ++i) {
            test_rule(kernels.rules[i], codec, count, offset);
          }
        }
      }
    }
  }
}
