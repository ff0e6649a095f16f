// The update rules against references for one element, bit for bit.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "isa.h"
#include "kernels.h"
#include "values.h"

namespace {

// A float that is rounded after every operation: no fused multiply-add, whatever the compiler's
// default.
struct Rounded {
  Rounded(float number) : value(number) {}
  operator float() const { return value; }
  volatile float value;
};
Rounded operator*(const Rounded& left, const Rounded& right) { return {left.value * right.value}; }
Rounded operator+(const Rounded& left, const Rounded& right) { return {left.value + right.value}; }
Rounded operator-(const Rounded& left, const Rounded& right) { return {left.value - right.value}; }
Rounded operator/(const Rounded& left, const Rounded& right) {
  return {right.value == 0.0f ? 0.0f : left.value / right.value};
}
Rounded root(const Rounded& of) { return {std::sqrt(of.value)}; }

// Parameters and slots; the second is unused by rules of one slot.
struct State {
  std::vector<float> p, s, t;
};

struct Rule {
  const char* name;
  std::vector<float> numbers;
  std::function<void(Rounded g, float& p, float& s, float& t)> reference;
};

constexpr float rate = 0.1f, keep = 0.9f, share = 0.25f, eps = 1e-8f, scale = 1.5f;

std::vector<Rule> rules(float decay) {
  const auto decayed = [=](const Rounded& g, float p) {
    return decay == 0 ? g : g + Rounded(decay) * Rounded(p);
  };
  const auto adam_reference = [](const Rounded& g, float& p, float& m, float& v) {
    m = Rounded(keep) * Rounded(m) + Rounded(share) * g;
    v = Rounded(keep) * Rounded(v) + Rounded(share) * (g * g);
    p = Rounded(p) - Rounded(rate) * Rounded(m) / (root({v}) * Rounded(scale) + Rounded(eps));
  };
  return {
      {"sgd",
       {rate, decay},
       [=](Rounded g, float& p, float&, float&) {
         p = Rounded(p) - Rounded(rate) * decayed(g, p);
       }},
      {"momentum",
       {rate, keep, share, decay},
       [=](Rounded g, float& p, float& v, float&) {
         v = Rounded(keep) * Rounded(v) + Rounded(share) * decayed(g, p);
         p = Rounded(p) - Rounded(rate) * Rounded(v);
       }},
      {"heavy_ball",
       {rate, keep, decay},
       [=](Rounded g, float& p, float& v, float&) {
         v = Rounded(keep) * Rounded(v) + Rounded(rate) * decayed(g, p);
         p = Rounded(p) - Rounded(v);
       }},
      {"nesterov",
       {rate, keep, decay},
       [=](Rounded g, float& p, float& v, float&) {
         const Rounded d = decayed(g, p);
         v = Rounded(keep) * Rounded(v) + d;
         p = Rounded(p) - Rounded(rate) * (d + Rounded(keep) * Rounded(v));
       }},
      {"delayed_nesterov",
       {rate, keep, share, 1.0f, decay},
       [=](Rounded g, float& p, float& v, float& sum) {
         const Rounded d = decayed(g, p);
         v = Rounded(keep) * Rounded(v) + Rounded(share) * (Rounded(sum) + d);
         p = Rounded(p) - Rounded(rate) * (Rounded(share) * d + Rounded(keep) * Rounded(v));
         sum = 0.0f;
       }},
      {"adagrad",
       {rate, eps, decay},
       [=](Rounded g, float& p, float& a, float&) {
         const Rounded d = decayed(g, p);
         a = Rounded(a) + d * d;
         p = Rounded(p) - Rounded(rate) * d / (root({a}) + Rounded(eps));
       }},
      {"rmsprop",
       {rate, keep, share, eps, decay},
       [=](Rounded g, float& p, float& s, float&) {
         const Rounded d = decayed(g, p);
         s = Rounded(keep) * Rounded(s) + Rounded(share) * (d * d);
         p = Rounded(p) - Rounded(rate) * d / (root({s}) + Rounded(eps));
       }},
      {"adam",
       {rate, keep, share, keep, share, scale, eps, decay},
       [=](Rounded g, float& p, float& m, float& v) { adam_reference(decayed(g, p), p, m, v); }},
      {"adamw",
       {rate, keep, share, keep, share, scale, eps, decay, 1 - decay},
       [=](Rounded g, float& p, float& m, float& v) {
         p = Rounded(1 - decay) * Rounded(p);
         adam_reference(g, p, m, v);
       }},
  };
}

const pyps::Rule& find(const std::string& name) {
  const pyps::Kernels& kernels = pyps::kernels();
  const auto* end = kernels.rules + kernels.num_rules;
  const auto* found =
      std::find_if(kernels.rules, end, [&](auto& rule) { return rule.name == name; });
  CHECK(found != end);
  return *found;
}

std::size_t sgd(std::vector<float>& parameters, pyps::Gradients gradients, pyps::Reply reply,
                float step) {
  const float numbers[] = {step, 0.0f};
  float* const arrays[] = {parameters.data()};
  return find("sgd").update(arrays, gradients, reply, parameters.size(), numbers);
}

// Payloads of these codecs, each at another offset, with factors 1, 0.5, 0.25, ...
struct Sum {
  Sum(std::initializer_list<Codec> of, std::size_t count, std::size_t offset) : total(count) {
    const pyps::Kernels& kernels = pyps::kernels();
    payloads.reserve(of.size());
    float factor = 1.0f;
    for (const Codec codec : of) {
      const auto index = static_cast<unsigned>(payloads.size());
      payloads.emplace_back(bytes_of(codec, count), (offset + 3 * index) % 8);
      unsigned char* data = payloads.back().data();
      std::vector<float> values = random_values(count, 10 + index);
      kernels.encode(data, values.data(), codec, count);
      kernels.decode(values.data(), data, codec, count);
      gradients.push_back({data, codec, factor});
      for (std::size_t i = 0; i < count; ++i) {
        const Rounded weighted = Rounded(factor) * Rounded(values[i]);
        total[i] = index == 0 ? weighted : Rounded(total[i]) + weighted;
      }
      factor *= 0.5f;
    }
  }

  std::vector<Payload> payloads;
  std::vector<pyps::Gradient> gradients;
  std::vector<float> total;
};

void check_reply(const unsigned char* reply, Codec codec, const std::vector<float>& parameters) {
  const std::size_t size = bytes_of(codec, 1);
  unsigned char expected[sizeof(float)];
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    pyps::kernels().encode(expected, &parameters[i], codec, 1);
    CHECK(std::memcmp(reply + i * size, expected, size) == 0);
  }
}

// With a reply in one codec after the other, each at another offset, and every other time guarded.
void test_rule(const Rule& rule, const Sum& sum) {
  const std::size_t count = sum.total.size();
  State found = {random_values(count, 1), std::vector<float>(count), std::vector<float>(count)};
  State expected = found;
  for (unsigned update = 0; update < 4; ++update) {
    const bool guarded = update % 2 == 1;
    const Codec codec = codecs[update % 3];
    Payload reply(bytes_of(codec, count), (update + count) % 8);
    float* const arrays[] = {found.p.data(), found.s.data(), found.t.data()};
    const std::size_t left_out =
        find(rule.name).update(arrays, {sum.gradients.data(), sum.gradients.size(), guarded},
                               {reply.data(), codec}, count, rule.numbers.data());
    for (std::size_t i = 0; i < count; ++i) {
      rule.reference(sum.total[i], expected.p[i], expected.s[i], expected.t[i]);
    }
    CHECK(left_out == 0);
    CHECK(same_bits(found.p, expected.p));
    CHECK(same_bits(found.s, expected.s));
    CHECK(same_bits(found.t, expected.t));
    check_reply(reply.data(), codec, found.p);
  }
}

// Replies so long that they go past the caches, at every place in a line of memory.
void test_long_replies() {
  for (const Codec codec : codecs) {
    const std::size_t count = 256 * 1024 / bytes_of(codec, 1) + 77;
    std::vector<float> parameters = random_values(count, 1);
    const std::vector<float> gradient = random_values(count, 2);
    const pyps::Gradient only = {gradient.data(), Codec::float32, 1.0f};
    for (std::size_t offset = 0; offset < 65; ++offset) {
      Payload reply(bytes_of(codec, count), offset);
      sgd(parameters, {&only, 1, offset % 2 == 1}, {reply.data(), codec}, rate);
      check_reply(reply.data(), codec, parameters);
    }
  }
}

// A block of a guarded gradient that is not finite is left out, and nothing else is.
void test_left_out(Codec codec, std::size_t count, std::size_t bad) {
  const pyps::Kernels& kernels = pyps::kernels();
  std::vector<float> values(count, 1.0f);
  values[bad] = std::numeric_limits<float>::quiet_NaN();
  Payload broken(bytes_of(codec, count), 3);
  kernels.encode(broken.data(), values.data(), codec, count);
  const std::vector<float> sound(count, 2.0f);
  const pyps::Gradient both[] = {{broken.data(), codec, 1.0f},
                                 {sound.data(), Codec::float32, 1.0f}};
  for (const std::size_t num : {1u, 2u}) {
    std::vector<float> parameters(count);
    const std::size_t left_out = sgd(parameters, {both, num, true}, {}, 1.0f);
    std::size_t found = 0;
    for (const float parameter : parameters) {
      const float of_sound = num == 1 ? 0.0f : -2.0f;
      CHECK(parameter == of_sound || parameter == of_sound - 1.0f);
      found += parameter == of_sound;
    }
    CHECK(found == left_out);
    CHECK(left_out >= 1 && left_out <= 1024);
    CHECK(parameters[bad] == (num == 1 ? 0.0f : -2.0f));
  }
}

void test_bandwidth(std::size_t count) {
  const std::vector<float> values = random_values(count, 1);
  const std::vector<float> gradient = random_values(count, 2);
  for (std::size_t num_arrays = 1; num_arrays <= 3; ++num_arrays) {
    std::vector<std::vector<float>> arrays(num_arrays, values);
    std::vector<float*> pointers;
    for (std::vector<float>& array : arrays) pointers.push_back(array.data());
    pyps::kernels().bandwidth(pointers.data(), num_arrays, gradient.data(), count);
    for (const std::vector<float>& array : arrays) {
      for (std::size_t i = 0; i < count; ++i) CHECK(array[i] == values[i] + gradient[i]);
    }
  }
}

}  // namespace

void test_rules() {
  for (const std::string& isa : pyps::available_isas()) {
    pyps::select_isa(isa);
    CHECK(rules(0.0f).size() == pyps::kernels().num_rules);
    test_long_replies();
    for (const Codec codec : codecs) {
      for (const std::size_t bad : {0u, 1023u, 1024u, 1999u}) test_left_out(codec, 2000, bad);
    }
    for (const std::size_t count : lengths) {
      test_bandwidth(count);
      for (std::size_t offset = 0; offset < 8; ++offset) {
        for (const float decay : {0.0f, 0.01f}) {
          for (const Rule& rule : rules(decay)) {
            for (const Codec codec : codecs) test_rule(rule, Sum({codec}, count, offset));
            test_rule(rule, Sum({codecs[1], codecs[0], codecs[2], codecs[0]}, count, offset));
          }
        }
      }
    }
  }
}
