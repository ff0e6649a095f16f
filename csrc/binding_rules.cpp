// The update rules' part of the module pyps._kernels.
//
// Each function takes the numbers of its rule's formula and checks them. How a rate, a schedule or
// a bias correction makes those numbers stands in pyps/core/update_rules.py.

#include <cmath>
#include <deque>
#include <initializer_list>
#include <string>
#include <vector>

#include "binding_arguments.h"
#include "bindings.h"
#include "isa.h"
#include "kernels.h"

namespace pyps {
namespace {

float to_non_negative(double value, const char* name) {
  const float rounded = to_float32(value, name);
  if (rounded < 0) {
    throw py::value_error(std::string(name) + " is " + std::to_string(value) +
                          "; expected at least 0");
  }
  return rounded;
}

float to_fraction(double value, const char* name) {
  if (!(value >= 0 && value <= 1)) {
    throw py::value_error(std::string(name) + " is " + std::to_string(value) +
                          "; expected a number from 0 to 1");
  }
  return static_cast<float>(value);
}

// What is left of a fraction, rounded once.
float rest_of(double fraction) { return static_cast<float>(1.0 - fraction); }

// A list of (payload, codec, factor), each payload `count` values long. Held until destruction.
class GradientList {
 public:
  GradientList(py::handle list, std::size_t count) {
    if (!py::isinstance<py::list>(list) && !py::isinstance<py::tuple>(list)) {
      throw py::type_error("gradients is of type " + type_name(list) +
                           "; expected a list of (payload, codec, factor)");
    }
    const auto items = py::reinterpret_borrow<py::sequence>(list);
    if (items.size() == 0) {
      throw py::value_error("gradients is empty; expected at least one (payload, codec, factor)");
    }
    weighted_.reserve(items.size());
    for (const py::handle item : items) add(item, count);
  }

  Gradients view(bool guarded) const {
    return {.first = weighted_.data(), .num = weighted_.size(), .guarded = guarded};
  }
  const std::deque<Bytes>& payloads() const { return payloads_; }

 private:
  void add(py::handle item, std::size_t count) {
    const std::string name = "gradients[" + std::to_string(weighted_.size()) + "]";
    if (!py::isinstance<py::tuple>(item) || PyTuple_GET_SIZE(item.ptr()) != 3) {
      throw py::type_error(name + " is of type " + type_name(item) +
                           "; expected a tuple (payload, codec, factor)");
    }
    const auto part = [&](int index) { return py::handle(PyTuple_GET_ITEM(item.ptr(), index)); };
    const Codec codec = to_codec(to_number<int>(part(1), name, "codec"));
    const auto factor = static_cast<float>(to_number<double>(part(2), name, "factor"));
    if (!std::isfinite(factor)) {
      throw py::value_error(name + "'s factor is no number that is finite in float32");
    }
    const Bytes& payload = payloads_.emplace_back(part(0), name);
    payload.require_count(codec, count);
    weighted_.push_back({.payload = payload.data(), .codec = codec, .factor = factor});
  }

  std::deque<Bytes> payloads_;
  std::vector<Gradient> weighted_;
};

struct NamedArray {
  py::handle object;
  const char* name;
};

// The memory of one update: arrays of one length, each apart from the others, from every gradient
// and from the reply.
class Arrays {
 public:
  Arrays(std::initializer_list<NamedArray> arrays, py::handle gradients, py::handle reply,
         bool guarded)
      : written_(checked(arrays)),
        gradients_(gradients, written_.front().count()),
        reply_(reply, written_.front().count()),
        guarded_(guarded) {
    for (const Floats& array : written_) {
      for (const Bytes& payload : gradients_.payloads()) array.require_apart(payload);
      reply_.require_apart(array.data(), array.count() * sizeof(float), array.name());
    }
    for (const Bytes& payload : gradients_.payloads()) {
      reply_.require_apart(payload.data(), payload.size(), payload.name());
    }
  }

  float* operator[](std::size_t index) const { return written_[index].mutable_data(); }
  std::size_t count() const { return written_.front().count(); }
  Gradients gradients() const { return gradients_.view(guarded_); }
  Reply reply() const { return reply_.view(); }

 private:
  static std::vector<Floats> checked(std::initializer_list<NamedArray> arrays) {
    std::vector<Floats> written;
    written.reserve(arrays.size());
    for (const auto& [object, name] : arrays) {
      const Floats& array = written.emplace_back(object, name, Access::write);
      array.require_count(written.front());
      for (std::size_t i = 0; i + 1 < written.size(); ++i) written[i].require_apart(array);
    }
    return written;
  }

  std::vector<Floats> written_;
  GradientList gradients_;
  ReplyPlace reply_;
  bool guarded_;
};

std::size_t sgd(py::handle parameters, py::handle gradients, double rate, double weight_decay,
                py::handle reply, bool guarded) {
  const Arrays arrays({{parameters, "parameters"}}, gradients, reply, guarded);
  const SgdOptions options = {.rate = to_float32(rate, "rate"),
                              .weight_decay = to_non_negative(weight_decay, "weight_decay")};
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  return table.sgd(arrays[0], arrays.gradients(), arrays.reply(), arrays.count(), options);
}

std::size_t momentum(py::handle parameters, py::handle velocity, py::handle gradients, double rate,
                     double momentum, double dampening, double weight_decay, py::handle reply,
                     bool guarded) {
  const Arrays arrays({{parameters, "parameters"}, {velocity, "velocity"}}, gradients, reply,
                      guarded);
  const MomentumOptions options = {.rate = to_float32(rate, "rate"),
                                   .momentum = to_non_negative(momentum, "momentum"),
                                   .gradient_share = to_float32(1.0 - dampening, "dampening"),
                                   .weight_decay = to_non_negative(weight_decay, "weight_decay")};
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  return table.momentum(arrays[0], arrays[1], arrays.gradients(), arrays.reply(), arrays.count(),
                        options);
}

std::size_t heavy_ball(py::handle parameters, py::handle velocity, py::handle gradients,
                       double rate, double momentum, double weight_decay, py::handle reply,
                       bool guarded) {
  const Arrays arrays({{parameters, "parameters"}, {velocity, "velocity"}}, gradients, reply,
                      guarded);
  const HeavyBallOptions options = {.rate = to_float32(rate, "rate"),
                                    .momentum = to_non_negative(momentum, "momentum"),
                                    .weight_decay = to_non_negative(weight_decay, "weight_decay")};
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  return table.heavy_ball(arrays[0], arrays[1], arrays.gradients(), arrays.reply(), arrays.count(),
                          options);
}

std::size_t nesterov(py::handle parameters, py::handle velocity, py::handle gradients, double rate,
                     double momentum, double weight_decay, py::handle reply, bool guarded) {
  const Arrays arrays({{parameters, "parameters"}, {velocity, "velocity"}}, gradients, reply,
                      guarded);
  const NesterovOptions options = {.rate = to_float32(rate, "rate"),
                                   .momentum = to_non_negative(momentum, "momentum"),
                                   .weight_decay = to_non_negative(weight_decay, "weight_decay")};
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  return table.nesterov(arrays[0], arrays[1], arrays.gradients(), arrays.reply(), arrays.count(),
                        options);
}

std::size_t adagrad(py::handle parameters, py::handle accumulator, py::handle gradients,
                    double rate, double eps, double weight_decay, py::handle reply, bool guarded) {
  const Arrays arrays({{parameters, "parameters"}, {accumulator, "accumulator"}}, gradients, reply,
                      guarded);
  const AdagradOptions options = {.rate = to_float32(rate, "rate"),
                                  .eps = to_non_negative(eps, "eps"),
                                  .weight_decay = to_non_negative(weight_decay, "weight_decay")};
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  return table.adagrad(arrays[0], arrays[1], arrays.gradients(), arrays.reply(), arrays.count(),
                       options);
}

std::size_t rmsprop(py::handle parameters, py::handle square_average, py::handle gradients,
                    double rate, double decay, double eps, double weight_decay, py::handle reply,
                    bool guarded) {
  const Arrays arrays({{parameters, "parameters"}, {square_average, "square_average"}}, gradients,
                      reply, guarded);
  const RmspropOptions options = {.rate = to_float32(rate, "rate"),
                                  .decay = to_fraction(decay, "decay"),
                                  .gradient_share = rest_of(decay),
                                  .eps = to_non_negative(eps, "eps"),
                                  .weight_decay = to_non_negative(weight_decay, "weight_decay")};
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  return table.rmsprop(arrays[0], arrays[1], arrays.gradients(), arrays.reply(), arrays.count(),
                       options);
}

// The array arguments of Adam and AdamW.
Arrays adam_arrays(py::handle parameters, py::handle first_moment, py::handle second_moment,
                   py::handle gradients, py::handle reply, bool guarded) {
  return Arrays({{parameters, "parameters"},
                 {first_moment, "first_moment"},
                 {second_moment, "second_moment"}},
                gradients, reply, guarded);
}

AdamOptions adam_options(double rate, double beta1, double beta2, double root_scale, double eps,
                         double weight_decay) {
  return {.rate = to_float32(rate, "rate"),
          .beta1 = to_fraction(beta1, "beta1"),
          .gradient_share1 = rest_of(beta1),
          .beta2 = to_fraction(beta2, "beta2"),
          .gradient_share2 = rest_of(beta2),
          .root_scale = to_non_negative(root_scale, "root_scale"),
          .eps = to_non_negative(eps, "eps"),
          .weight_decay = to_non_negative(weight_decay, "weight_decay")};
}

std::size_t adam(py::handle parameters, py::handle first_moment, py::handle second_moment,
                 py::handle gradients, double rate, double beta1, double beta2, double root_scale,
                 double eps, double weight_decay, py::handle reply, bool guarded) {
  const Arrays arrays =
      adam_arrays(parameters, first_moment, second_moment, gradients, reply, guarded);
  const AdamOptions options = adam_options(rate, beta1, beta2, root_scale, eps, weight_decay);
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  return table.adam(arrays[0], arrays[1], arrays[2], arrays.gradients(), arrays.reply(),
                    arrays.count(), options);
}

std::size_t adamw(py::handle parameters, py::handle first_moment, py::handle second_moment,
                  py::handle gradients, double rate, double beta1, double beta2, double root_scale,
                  double eps, double weight_decay, py::handle reply, bool guarded) {
  const Arrays arrays =
      adam_arrays(parameters, first_moment, second_moment, gradients, reply, guarded);
  const AdamwOptions options = {adam_options(rate, beta1, beta2, root_scale, eps, weight_decay),
                                rest_of(weight_decay)};
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  return table.adamw(arrays[0], arrays[1], arrays[2], arrays.gradients(), arrays.reply(),
                     arrays.count(), options);
}

void bandwidth(const py::list& arrays, py::handle gradient) {
  if (arrays.size() < 1 || arrays.size() > 3) {
    throw py::value_error(std::to_string(arrays.size()) + " arrays; expected one to three");
  }
  std::vector<Floats> written;
  std::vector<float*> pointers;
  const Bytes g(gradient, "gradient");
  for (const py::handle array : arrays) {
    const Floats& added = written.emplace_back(array, "array", Access::write);
    added.require_count(written.front());
    for (std::size_t i = 0; i + 1 < written.size(); ++i) written[i].require_apart(written.back());
    written.back().require_apart(g);
    pointers.push_back(written.back().mutable_data());
  }
  g.require_count(Codec::float32, written.front().count());
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  table.bandwidth(pointers.data(), pointers.size(), g.data(), written.front().count());
}

}  // namespace

void bind_rules(py::module_& module) {
  using py::arg;
  const py::kw_only named;
  const arg parameters("parameters"), velocity("velocity"), gradients("gradients"), rate("rate");
  const arg first_moment("first_moment"), second_moment("second_moment"), eps("eps");
  const py::arg_v weight_decay("weight_decay", 0.0), reply("reply", py::none());
  const py::arg_v guarded("guarded", false);

  module.def("sgd", &sgd, parameters, gradients, named, rate, weight_decay, reply, guarded,
             "p = p - rate * g");
  module.def("momentum", &momentum, parameters, velocity, gradients, named, rate, arg("momentum"),
             arg("dampening") = 0.0, weight_decay, reply, guarded,
             "v = momentum * v + (1 - dampening) * g; p = p - rate * v");
  module.def("heavy_ball", &heavy_ball, parameters, velocity, gradients, named, rate,
             arg("momentum"), weight_decay, reply, guarded,
             "v = momentum * v + rate * g; p = p - v");
  module.def("nesterov", &nesterov, parameters, velocity, gradients, named, rate, arg("momentum"),
             weight_decay, reply, guarded,
             "v = momentum * v + g; p = p - rate * (g + momentum * v)");
  module.def("adagrad", &adagrad, parameters, arg("accumulator"), gradients, named, rate, eps,
             weight_decay, reply, guarded, "a = a + g * g; p = p - rate * g / (sqrt(a) + eps)");
  module.def("rmsprop", &rmsprop, parameters, arg("square_average"), gradients, named, rate,
             arg("decay"), eps, weight_decay, reply, guarded,
             "s = decay * s + (1 - decay) * g * g; p = p - rate * g / (sqrt(s) + eps)");
  module.def("adam", &adam, parameters, first_moment, second_moment, gradients, named, rate,
             arg("beta1"), arg("beta2"), arg("root_scale"), eps, weight_decay, reply, guarded,
             "m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g * g; "
             "p = p - rate * m / (sqrt(v) * root_scale + eps)");
  module.def("adamw", &adamw, parameters, first_moment, second_moment, gradients, named, rate,
             arg("beta1"), arg("beta2"), arg("root_scale"), eps, weight_decay, reply, guarded,
             "p = (1 - weight_decay) * p, then as adam without decay.");
  module.def("bandwidth", &bandwidth, arg("arrays"), arg("gradient"),
             "Moves the memory that a rule over these arrays moves. For benchmarks.");
}

}  // namespace pyps
