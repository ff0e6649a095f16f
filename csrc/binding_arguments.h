// What the bindings take from Python, checked; nothing is converted or copied.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "table.h"

namespace pyps {

namespace py = pybind11;

// A kernel over fewer numbers keeps the GIL: where another thread is busy, getting it back takes
// longer than the kernel does, and the shard's lock is held meanwhile.
constexpr std::size_t gil_release_count_min = 16'384;

// Releases the GIL, for as long as it lives, around a kernel that reads so many numbers.
class GilReleased {
 public:
  explicit GilReleased(std::size_t count) {
    if (count >= gil_release_count_min) release_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> release_;
};

inline const CodecTraits& to_codec(int number) {
  for (const CodecTraits& codec : all_codecs()) {
    if (static_cast<int>(codec.codec) == number) return codec;
  }
  std::string known;
  for (const CodecTraits& codec : all_codecs()) {
    const std::string each = std::to_string(static_cast<int>(codec.codec));
    known += (known.empty() ? "" : ", ") + std::string(codec.name) + " (" + each + ")";
  }
  throw py::value_error("codec is " + std::to_string(number) + "; expected " + known);
}

inline float to_float32(double value, const char* name) {
  const float rounded = static_cast<float>(value);
  if (!std::isfinite(rounded)) {
    throw py::value_error(std::string(name) + " is " + std::to_string(value) +
                          "; expected a number that is finite in float32");
  }
  return rounded;
}

inline std::string type_name(py::handle object) {
  return py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>();
}

template <class Number>
Number to_number(py::handle object, std::string_view owner, const char* name) {
  try {
    return object.cast<Number>();
  } catch (const py::cast_error&) {
    throw py::type_error(std::string(owner) + "'s " + name + " is of type " + type_name(object) +
                         "; expected a number");
  }
}

inline std::vector<std::string> names_in(const char* list) {
  std::vector<std::string> names;
  std::istringstream words(list);
  for (std::string name; std::getline(words >> std::ws, name, ',');) names.push_back(name);
  return names;
}

// The numbers of a rule's formula, which have these names.
inline std::vector<float> to_float32s(const py::tuple& numbers,
                                      const std::vector<std::string>& names, const Rule& rule) {
  if (numbers.size() != names.size()) {
    throw py::value_error(std::to_string(numbers.size()) + " numbers; " + rule.name + " takes " +
                          rule.numbers);
  }
  std::vector<float> values(names.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const char* name = names[i].c_str();
    values[i] = to_float32(to_number<double>(numbers[i], rule.name, name), name);
  }
  return values;
}

inline bool overlap(const void* one, std::size_t one_size, const void* other,
                    std::size_t other_size) {
  const auto first = reinterpret_cast<std::uintptr_t>(one);
  const auto second = reinterpret_cast<std::uintptr_t>(other);
  return first < second + other_size && second < first + one_size;
}

// A contiguous run of bytes that some Python object owns, read-only, held until destruction. It is
// created and destroyed with the GIL, and may be read without.
class Bytes {
 public:
  Bytes(py::handle object, std::string name) : name_(std::move(name)) {
    if (!PyObject_CheckBuffer(object.ptr())) {
      throw py::type_error(name_ + " is of type " + type_name(object) +
                           "; expected a buffer such as bytes, memoryview or numpy.ndarray");
    }
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      throw py::value_error(name_ + " is not C-contiguous");
    }
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  const unsigned char* data() const { return static_cast<const unsigned char*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }
  const std::string& name() const { return name_; }

  // Raw bytes may hold any codec; an array of numbers must hold the codec's own.
  void require_count(const CodecTraits& codec, std::size_t count) const {
    require_format({&codec.format, 1}, codec.name);
    // The bytes of more numbers than memory holds may wrap around to these.
    if (count > PTRDIFF_MAX / sizeof(float) || size() != codec.bytes_of(count)) {
      throw py::value_error(name_ + " holds " + std::to_string(size()) + " bytes; " +
                            std::to_string(count) + " values of " + codec.name + " take " +
                            std::to_string(codec.bytes_of(count)));
    }
  }

  // As require_count, for rows that are each encoded by themselves.
  void require_rows(const CodecTraits& codec, std::size_t num_rows, std::size_t dim) const {
    require_format({&codec.format, 1}, codec.name);
    require_size(num_rows * codec.bytes_of(dim));
  }

  void require_size(std::size_t expected) const {
    if (size() == expected) return;
    throw py::value_error(name_ + " holds " + std::to_string(size()) + " bytes; expected " +
                          std::to_string(expected) + ", so many a row");
  }

  // Whole numbers, which an array has in one of these formats.
  template <class Number>
  Packed<Number> numbers(const char* formats, const char* type) const {
    require_format(formats, type);
    if (size() % sizeof(Number) != 0) {
      throw py::value_error(name_ + " holds " + std::to_string(size()) + " bytes; expected " +
                            std::to_string(sizeof(Number)) + " for each " + type);
    }
    return {data(), size() / sizeof(Number)};
  }

 private:
  void require_format(std::string_view formats, const char* type) const {
    const char* format = view_.format == nullptr ? "B" : view_.format;
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    const bool raw = view_.itemsize == 1 && std::strchr("Bbc", *format) != nullptr;
    const bool known = *format != '\0' && formats.find(*format) != formats.npos;
    if (*format == '\0' || format[1] != '\0' || !(raw || known)) {
      throw py::type_error(name_ + " has the buffer format '" +
                           (view_.format == nullptr ? "" : view_.format) + "'; " + type +
                           " takes raw bytes ('B', 'b', 'c') or '" + formats[0] + "'");
    }
  }

  std::string name_;
  Py_buffer view_ = {};
};

enum class Access { read, write };

// A one-dimensional numpy array of float32, as it lies in memory.
class Floats {
 public:
  Floats(py::handle object, std::string name, Access access) : name_(std::move(name)) {
    if (!py::isinstance<py::array>(object)) {
      throw py::type_error(name_ + " is of type " + type_name(object) +
                           "; expected a numpy.ndarray of float32");
    }
    array_ = py::reinterpret_borrow<py::array>(object);
    const py::dtype dtype = array_.dtype();
    if (dtype.num() != py::detail::npy_api::NPY_FLOAT_ || dtype.byteorder() != '=') {
      throw py::type_error(name_ + " has dtype " + py::str(dtype).cast<std::string>() +
                           "; expected float32");
    }
    if (array_.ndim() != 1) refuse(std::to_string(array_.ndim()) + "-dimensional; expected 1-D");
    if ((array_.flags() & py::array::c_style) == 0) refuse("not C-contiguous");
    if (access == Access::write && !array_.writeable()) refuse("not writable");
    if (reinterpret_cast<std::uintptr_t>(array_.data()) % sizeof(float) != 0) {
      refuse("not aligned to " + std::to_string(sizeof(float)) + " bytes");
    }
  }

  const float* data() const { return static_cast<const float*>(array_.data()); }
  float* mutable_data() const { return const_cast<float*>(data()); }
  std::size_t count() const { return static_cast<std::size_t>(array_.size()); }
  std::size_t size() const { return count() * sizeof(float); }
  const std::string& name() const { return name_; }

  void require_count(const Floats& other) const {
    if (count() == other.count()) return;
    refuse(std::to_string(count()) + " long; " + other.name() + " is " +
           std::to_string(other.count()) + " long");
  }

  // For loops that assume that what they write is nowhere else read.
  void require_apart(const Floats& other) const {
    require_apart(other.data(), other.size(), other.name());
  }
  void require_apart(const Bytes& other) const {
    require_apart(other.data(), other.size(), other.name());
  }

 private:
  void require_apart(const void* other, std::size_t other_size,
                     const std::string& other_name) const {
    if (overlap(data(), size(), other, other_size)) {
      throw py::value_error(name_ + " and " + other_name + " overlap in memory");
    }
  }

  [[noreturn]] void refuse(const std::string& complaint) const {
    throw py::value_error(name_ + " is " + complaint);
  }

  std::string name_;
  py::array array_;
};

// Where parameters are written to, encoded: (writable buffer, byte offset, codec), or None. The
// buffer may be a new bytes object, which has no other reader yet. Held until destruction.
class ReplyPlace {
 public:
  // For `num_rows` times as many numbers where rows are each encoded by themselves.
  ReplyPlace(py::handle reply, std::size_t count, std::size_t num_rows = 1) {
    if (reply.is_none()) return;
    if (!py::isinstance<py::tuple>(reply) || PyTuple_GET_SIZE(reply.ptr()) != 3) {
      throw py::type_error("reply is of type " + type_name(reply) +
                           "; expected None or a tuple (buffer, offset, codec)");
    }
    reply_ = py::reinterpret_borrow<py::tuple>(reply);
    const CodecTraits& codec = to_codec(to_number<int>(reply_[2], "reply", "codec"));
    codec_ = codec.codec;
    const auto offset = to_number<std::int64_t>(reply_[1], "reply", "offset");
    open(reply_[0]);
    const std::size_t size = num_rows * codec.bytes_of(count);
    const std::size_t held = buffer_size_;
    if (offset < 0 || static_cast<std::uint64_t>(offset) > held ||
        size > held - static_cast<std::size_t>(offset)) {
      throw py::value_error("reply holds " + std::to_string(held) + " bytes; " +
                            std::to_string(num_rows * count) + " values of " + codec.name +
                            " take " + std::to_string(size) + " from byte " +
                            std::to_string(offset) + " on");
    }
    encoded_ = buffer_ + offset;
  }
  ~ReplyPlace() { PyBuffer_Release(&view_); }
  ReplyPlace(const ReplyPlace&) = delete;
  ReplyPlace& operator=(const ReplyPlace&) = delete;

  Reply view() const { return {.encoded = encoded_, .codec = codec_}; }

 private:
  void open(py::handle buffer) {
    if (PyBytes_CheckExact(buffer.ptr())) {
      buffer_ = reinterpret_cast<unsigned char*>(PyBytes_AS_STRING(buffer.ptr()));
      buffer_size_ = static_cast<std::size_t>(PyBytes_GET_SIZE(buffer.ptr()));
      return;
    }
    if (PyObject_GetBuffer(buffer.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) != 0) {
      PyErr_Clear();
      throw py::type_error("reply's buffer is of type " + type_name(buffer) +
                           "; expected a new bytes object or a writable, contiguous buffer");
    }
    buffer_ = static_cast<unsigned char*>(view_.buf);
    buffer_size_ = static_cast<std::size_t>(view_.len);
  }

  py::tuple reply_;
  Py_buffer view_ = {};
  unsigned char* buffer_ = nullptr;
  std::size_t buffer_size_ = 0;
  unsigned char* encoded_ = nullptr;
  Codec codec_ = Codec::float32;
};

}  // namespace pyps
