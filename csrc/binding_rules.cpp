// The update rules' part of the module pyps._kernels: one function for all of them.
//
// How settings, a schedule or a bias correction make the numbers of a rule's formula stands in
// pyps/core/rules.py.

#include <cmath>
#include <deque>
#include <map>
#include <sstream>
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

  const std::vector<Floats>& all() const { return arrays_; }
  float* const* pointers() const { return pointers_.data(); }
  std::size_t count() const { return arrays_.front().count(); }

 private:
  std::vector<Floats> arrays_;
  std::vector<float*> pointers_;
};

const Rule& find_rule(const std::string& name) {
  const Kernels& table = kernels();
  std::string known;
  for (std::size_t i = 0; i < table.num_rules; ++i) {
    if (name == table.rules[i].name) return table.rules[i];
    known += (known.empty() ? "" : ", ") + std::string(table.rules[i].name);
  }
  throw py::value_error("rule is '" + name + "'; expected one of: " + known);
}

// Calls `take(value, name)` for each name of a list such as "rate, eps", in its order. There may be
// others in `by_name`.
template <class Take>
void take_named(const char* list, const py::dict& by_name, Take take) {
  // For good: to make the names anew takes longer than a small update.
  static auto* const known = new std::map<const char*, std::vector<py::str>>;
  const auto [entry, fresh] = known->try_emplace(list);
  std::vector<py::str>& names = entry->second;
  if (fresh) {
    std::istringstream words(list);
    for (std::string name; std::getline(words >> std::ws, name, ',');) names.emplace_back(name);
  }
  for (const py::str& name : names) {
    const char* text = PyUnicode_AsUTF8(name.ptr());
    const py::handle value = PyDict_GetItem(by_name.ptr(), name.ptr());
    if (!value) throw py::value_error(std::string(text) + " is missing; the rule takes " + list);
    take(value, text);
  }
}

std::size_t apply(const std::string& rule_name, py::handle parameters, const py::dict& slots,
                  py::handle gradient_list, const py::dict& numbers, py::handle reply,
                  bool guarded) {
  const Rule& rule = find_rule(rule_name);
  WrittenArrays arrays;
  arrays.add(parameters, "parameters");
  take_named(rule.slots, slots, [&](auto slot, auto name) { arrays.add(slot, name); });
  const GradientList gradients(gradient_list, arrays.count());
  const ReplyPlace place(reply, arrays.count());
  for (const Floats& array : arrays.all()) place.require_apart(array);
  for (const Bytes& payload : gradients.payloads()) {
    arrays.require_apart(payload);
    place.require_apart(payload);
  }
  std::vector<float> values;
  take_named(rule.numbers, numbers, [&](auto number, auto name) {
    values.push_back(to_float32(to_number<double>(number, rule.name, name), name));
  });
  py::gil_scoped_release release;
  return rule.update(arrays.pointers(), gradients.view(guarded), place.view(), arrays.count(),
                     values.data());
}

void bandwidth(const py::list& list, py::handle gradient) {
  if (list.size() < 1 || list.size() > 3) {
    throw py::value_error(std::to_string(list.size()) + " arrays; expected one to three");
  }
  WrittenArrays arrays;
  for (const py::handle array : list) arrays.add(array, "array");
  const Bytes g(gradient, "gradient");
  g.require_count(Codec::float32, arrays.count());
  arrays.require_apart(g);
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  table.bandwidth(arrays.pointers(), list.size(), g.data(), arrays.count());
}

}  // namespace

void bind_rules(py::module_& module) {
  using py::arg;
  module.def("apply", &apply, arg("rule"), arg("parameters"), arg("slots"), arg("gradients"),
             arg("numbers"), arg("reply") = py::none(), arg("guarded") = false,
             "Updates parameters and slots by the rule of that name.");
  module.def("bandwidth", &bandwidth, arg("arrays"), arg("gradient"),
             "Moves the memory that a rule over these arrays moves. For benchmarks.");
}

}  // namespace pyps
