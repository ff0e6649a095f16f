// The update rules' part of the module pyps._kernels: a rule bound to a shard's arrays.
//
// How settings, a schedule or a bias correction make the numbers of a rule's formula stands in
// pyps/core/rules.py.

#include <pybind11/stl.h>

#include <cmath>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "binding_arguments.h"
#include "bindings.h"
#include "isa.h"
#include "kernels.h"

namespace pyps {
namespace {

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
  std::size_t size() const { return weighted_.size(); }

 private:
  void add(py::handle item, std::size_t count) {
    const std::string name = "gradients[" + std::to_string(weighted_.size()) + "]";
    if (!py::isinstance<py::tuple>(item) || PyTuple_GET_SIZE(item.ptr()) != 3) {
      throw py::type_error(name + " is of type " + type_name(item) +
                           "; expected a tuple (payload, codec, factor)");
    }
    const auto part = [&](int index) { return py::handle(PyTuple_GET_ITEM(item.ptr(), index)); };
    const CodecTraits& codec = to_codec(to_number<int>(part(1), name, "codec"));
    const auto factor = static_cast<float>(to_number<double>(part(2), name, "factor"));
    if (!std::isfinite(factor)) {
      throw py::value_error(name + "'s factor is no number that is finite in float32");
    }
    const Bytes& payload = payloads_.emplace_back(part(0), name);
    payload.require_count(codec, count);
    weighted_.push_back({.payload = payload.data(), .codec = codec.codec, .factor = factor});
  }

  std::deque<Bytes> payloads_;
  std::vector<Gradient> weighted_;
};

// What a kernel writes: arrays of one length, each apart from the others.
class WrittenArrays {
 public:
  void add(py::handle object, const char* name) {
    const Floats& added = arrays_.emplace_back(object, name, Access::write);
    added.require_count(arrays_.front());
    for (std::size_t i = 0; i + 1 < arrays_.size(); ++i) arrays_[i].require_apart(added);
    pointers_.push_back(added.mutable_data());
  }

  void require_apart(const Bytes& other) const {
    for (const Floats& array : arrays_) array.require_apart(other);
  }

  std::vector<float*> pointers(std::size_t start) const {
    std::vector<float*> moved = pointers_;
    for (float*& array : moved) array += start;
    return moved;
  }
  std::size_t count() const { return arrays_.front().count(); }

 private:
  std::vector<Floats> arrays_;
  std::vector<float*> pointers_;
};

std::size_t index_of(const std::string& rule_name) {
  const Kernels& table = kernels();
  for (std::size_t i = 0; i < table.num_rules; ++i) {
    if (rule_name == table.rules[i].name) return i;
  }
  std::string known;
  for (std::size_t i = 0; i < table.num_rules; ++i) {
    known += (known.empty() ? "" : ", ") + std::string(table.rules[i].name);
  }
  throw py::value_error("rule is '" + rule_name + "'; expected one of: " + known);
}

// A rule bound to the arrays of one shard. They are checked here, and not again for each update.
class ShardKernel {
 public:
  ShardKernel(const std::string& rule_name, py::handle parameters, const py::dict& slots)
      : rule_index_(index_of(rule_name)), numbers_(names_in(rule().numbers)) {
    arrays_.add(parameters, "parameters");
    for (const std::string& name : names_in(rule().slots)) {
      if (!slots.contains(name.c_str())) {
        throw py::value_error(name + " is missing; the rule takes " + rule().slots);
      }
      arrays_.add(slots[name.c_str()], name.c_str());
    }
  }

  const std::vector<std::string>& numbers() const { return numbers_; }

  std::size_t apply(py::handle gradient_list, const py::tuple& numbers, py::handle reply,
                    bool guarded, std::size_t start, std::optional<std::size_t> stop) const {
    const std::size_t end = stop.value_or(arrays_.count());
    if (start > end || end > arrays_.count()) {
      throw py::value_error("the stretch " + std::to_string(start) + " to " + std::to_string(end) +
                            " is none of " + std::to_string(arrays_.count()) + " parameters");
    }
    const std::size_t count = end - start;
    const GradientList gradients(gradient_list, count);
    const ReplyPlace place(reply, count);
    const std::vector<float> values = to_float32s(numbers, numbers_, rule());
    const std::vector<float*> arrays = arrays_.pointers(start);
    const GilReleased without_gil(count * gradients.size());
    return rule().update(arrays.data(), gradients.view(guarded), place.view(), count,
                         values.data());
  }

  void write(py::handle reply) const {
    const ReplyPlace place(reply, arrays_.count());
    const Reply target = place.view();
    if (target.encoded == nullptr) {
      throw py::type_error("reply is None; expected a tuple (buffer, offset, codec)");
    }
    const GilReleased without_gil(arrays_.count());
    kernels().encode(target.encoded, arrays_.pointers(0)[0], target.codec, arrays_.count());
  }

 private:
  // Of the instruction set in use, which tests switch.
  const Rule& rule() const { return kernels().rules[rule_index_]; }

  std::size_t rule_index_;
  std::vector<std::string> numbers_;
  WrittenArrays arrays_;
};

void bandwidth(const py::list& list, py::handle gradient) {
  if (list.size() < 1 || list.size() > 3) {
    throw py::value_error(std::to_string(list.size()) + " arrays; expected one to three");
  }
  WrittenArrays arrays;
  for (const py::handle array : list) arrays.add(array, "array");
  const Bytes g(gradient, "gradient");
  g.require_count(to_codec(1), arrays.count());
  arrays.require_apart(g);
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  table.bandwidth(arrays.pointers(0).data(), list.size(), g.data(), arrays.count());
}

}  // namespace

void bind_rules(py::module_& module) {
  using py::arg;
  py::class_<ShardKernel>(module, "ShardKernel")
      .def(py::init<const std::string&, py::handle, const py::dict&>(), arg("rule"),
           arg("parameters"), arg("slots"))
      .def_property_readonly("numbers", &ShardKernel::numbers)
      .def("apply", &ShardKernel::apply, arg("gradients"), arg("numbers"),
           arg("reply") = py::none(), arg("guarded") = false, arg("start") = 0,
           arg("stop") = py::none())
      .def("write", &ShardKernel::write, arg("reply"));
  module.def("bandwidth", &bandwidth, arg("arrays"), arg("gradient"));
}

}  // namespace pyps
