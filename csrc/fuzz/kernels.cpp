// The servers' kernels on payloads of the network: is it finite, what are its numbers, and an
// update by it, which must be the same on every instruction set. An input is codec, rule and count,
// then the payload, which a worker that shares its memory may have changed since it was looked at.
#include "kernels.h"

#include <limits>

#include "input.h"
#include "isa.h"

namespace {

constexpr std::size_t count_max = 2100;

struct Outcome {
  std::ptrdiff_t first_non_finite;
  std::size_t left_out;
  std::vector<float> values, parameters, slot;

  bool operator==(const Outcome& other) const {
    return first_non_finite == other.first_non_finite && left_out == other.left_out &&
           same(values, other.values) && same(parameters, other.parameters) &&
           same(slot, other.slot);
  }
};

Outcome outcome_of(pyps::Codec codec, const pyps::Rule& rule, std::size_t count,
                   const std::vector<std::uint8_t>& payload, bool guarded) {
  const pyps::Kernels& kernels = pyps::kernels();
  Outcome outcome = {kernels.first_non_finite(payload.data(), codec, count), 0,
                     std::vector<float>(count), std::vector<float>(count, 1.0f),
                     std::vector<float>(count, 0.5f)};
  kernels.decode(outcome.values.data(), payload.data(), codec, count);
  const auto finite = [](float value) { return value - value == 0.0f; };
  const auto found = std::find_if_not(outcome.values.begin(), outcome.values.end(), finite);
  const std::ptrdiff_t expected =
      found == outcome.values.end() ? -1 : found - outcome.values.begin();
  REQUIRE(outcome.first_non_finite == expected);
  const pyps::Gradient gradients[] = {{payload.data(), codec, 0.5f},
                                      {payload.data(), codec, 0.25f}};
  std::vector<float> other(count, 0.25f);
  float* const arrays[] = {outcome.parameters.data(), outcome.slot.data(), other.data()};
  // More than any rule takes.
  const std::vector<float> numbers(16, 0.5f);
  std::vector<std::uint8_t> reply(payload.size());
  outcome.left_out =
      rule.update(arrays, {gradients, 2, guarded}, {reply.data(), codec}, count, numbers.data());
  if (guarded && expected == -1) REQUIRE(outcome.left_out == 0);
  return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const auto codec = static_cast<pyps::Codec>(1 + input.below(6));
  const std::size_t rule = input.below(pyps::kernels().num_rules);
  const std::size_t count = 1 + input.below(count_max);
  const std::vector<std::uint8_t> payload =
      input.bytes(pyps::all_codecs()[static_cast<std::size_t>(codec) - 1].bytes_of(count));
  for (const bool guarded : {false, true}) {
    std::vector<Outcome> outcomes;
    for (const std::string& isa : pyps::available_isas()) {
      pyps::select_isa(isa);
      outcomes.push_back(outcome_of(codec, pyps::kernels().rules[rule], count, payload, guarded));
      REQUIRE(outcomes.back() == outcomes.front());
    }
  }
  return 0;
}
