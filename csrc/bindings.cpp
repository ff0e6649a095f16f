// The module pyps._kernels; the only file that knows Python.
//
// A binding checks its arguments, releases the GIL, calls, and does nothing else. It never converts
// or copies what it was given: an array that does not fit is refused.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstring>
#include <string>

#include "framing.h"
#include "isa.h"
#include "kernels.h"

namespace py = pybind11;

namespace pyps {
namespace {

// Walking a smaller message costs less than handing over the GIL.
constexpr std::size_t gil_release_size_min = 64 * 1024;

Codec to_codec(int number) {
  switch (number) {
    case 1:
      return Codec::float32;
    case 2:
      return Codec::float16;
    case 3:
      return Codec::bfloat16;
    default:
      throw py::value_error("codec is " + std::to_string(number) +
                            "; expected FLOAT32 (1), FLOAT16 (2) or BFLOAT16 (3)");
  }
}

const char* name_of(Codec codec) {
  switch (codec) {
    case Codec::float16:
      return "float16";
    case Codec::bfloat16:
      return "bfloat16";
    case Codec::float32:
      break;
  }
  return "float32";
}

float to_float32(double value, const char* name) {
  const float rounded = static_cast<float>(value);
  if (!std::isfinite(rounded)) {
    throw py::value_error(std::string(name) + " is " + std::to_string(value) +
                          "; expected a number that is finite in float32");
  }
  return rounded;
}

std::uint32_t to_field_number(std::int64_t number) {
  if (number < 1 || number > field_number_max) {
    throw py::value_error("field_number is " + std::to_string(number) + "; expected 1 to " +
                          std::to_string(field_number_max));
  }
  return static_cast<std::uint32_t>(number);
}

std::string type_name(py::handle object) {
  return py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>();
}

// A contiguous run of bytes that some Python object owns, read-only, held until destruction. It is
// created and destroyed with the GIL, and may be read without.
class Bytes {
 public:
  Bytes(py::handle object, const char* name) : name_(name) {
    if (!PyObject_CheckBuffer(object.ptr())) {
      throw py::type_error(std::string(name) + " is of type " + type_name(object) +
                           "; expected a buffer such as bytes, memoryview or numpy.ndarray");
    }
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      throw py::value_error(std::string(name) + " is not C-contiguous");
    }
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  const unsigned char* data() const { return static_cast<const unsigned char*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

  // Raw bytes may hold any codec; an array of numbers must hold the codec's own.
  void require_format(Codec codec) const {
    const char* format = view_.format == nullptr ? "B" : view_.format;
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    const char wanted = codec == Codec::float32 ? 'f' : codec == Codec::float16 ? 'e' : 'H';
    const bool raw = view_.itemsize == 1 && std::strchr("Bbc", *format) != nullptr;
    const bool matching =
        static_cast<std::size_t>(view_.itemsize) == size_of(codec) && *format == wanted;
    if (*format == '\0' || format[1] != '\0' || !(raw || matching)) {
      throw py::type_error(std::string(name_) + " has the buffer format '" +
                           (view_.format == nullptr ? "" : view_.format) + "'; " + name_of(codec) +
                           " takes raw bytes ('B', 'b', 'c') or '" + wanted + "'");
    }
  }

  void require_count(Codec codec, std::size_t count) const {
    require_format(codec);
    if (size() != count * size_of(codec)) {
      throw py::value_error(std::string(name_) + " holds " + std::to_string(size()) + " bytes; " +
                            std::to_string(count) + " values of " + name_of(codec) + " take " +
                            std::to_string(count * size_of(codec)));
    }
  }

  std::size_t count_of(Codec codec) const {
    require_format(codec);
    if (size() % size_of(codec) != 0) {
      throw py::value_error(std::string(name_) + " holds " + std::to_string(size()) +
                            " bytes, which is no whole number of " + name_of(codec) + " values");
    }
    return size() / size_of(codec);
  }

 private:
  const char* name_;
  Py_buffer view_ = {};
};

enum class Access { read, write };

// A one-dimensional float32 numpy array, as it lies in memory.
class Floats {
 public:
  Floats(py::handle object, const char* name, Access access) : name_(name) {
    if (!py::isinstance<py::array>(object)) {
      throw py::type_error(std::string(name) + " is of type " + type_name(object) +
                           "; expected a numpy.ndarray of float32");
    }
    array_ = py::reinterpret_borrow<py::array>(object);
    if (!array_.dtype().equal(py::dtype::of<float>())) {
      throw py::type_error(std::string(name) + " has dtype " +
                           py::str(array_.dtype()).cast<std::string>() + "; expected float32");
    }
    if (array_.ndim() != 1) refuse(std::to_string(array_.ndim()) + "-dimensional; expected 1-D");
    if ((array_.flags() & py::array::c_style) == 0) refuse("not C-contiguous");
    if (access == Access::write && !array_.writeable()) refuse("not writable");
    if (reinterpret_cast<std::uintptr_t>(array_.data()) % alignof(float) != 0) {
      refuse("not aligned to 4 bytes");
    }
  }

  const float* data() const { return static_cast<const float*>(array_.data()); }
  float* mutable_data() const { return static_cast<float*>(const_cast<void*>(array_.data())); }
  std::size_t count() const { return static_cast<std::size_t>(array_.size()); }
  const char* name() const { return name_; }

  void require_count(const Floats& other) const {
    if (count() == other.count()) return;
    refuse(std::to_string(count()) + " long; " + other.name() + " is " +
           std::to_string(other.count()) + " long");
  }

  void require_apart(const Floats& other) const {
    require_apart(other.data(), other.count() * sizeof(float), other.name());
  }
  void require_apart(const Bytes& other, const char* other_name) const {
    require_apart(other.data(), other.size(), other_name);
  }

 private:
  // The loops assume that what they write is nowhere else read.
  void require_apart(const void* other, std::size_t size, const char* other_name) const {
    const auto mine = reinterpret_cast<std::uintptr_t>(data());
    const auto theirs = reinterpret_cast<std::uintptr_t>(other);
    if (mine < theirs + size && theirs < mine + count() * sizeof(float)) {
      throw py::value_error(std::string(name_) + " and " + other_name + " overlap in memory");
    }
  }

  [[noreturn]] void refuse(const std::string& complaint) const {
    throw py::value_error(std::string(name_) + " is " + complaint);
  }

  const char* name_;
  py::array array_;
};

// A bytes object of `size` bytes that nobody else has seen, hence may be written without the GIL.
py::bytes new_bytes(std::size_t size, unsigned char** data) {
  PyObject* object = PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(size));
  if (object == nullptr) throw py::error_already_set();
  *data = reinterpret_cast<unsigned char*>(PyBytes_AS_STRING(object));
  return py::reinterpret_steal<py::bytes>(object);
}

void sgd(py::handle parameters, py::handle gradient, int codec_number, double rate) {
  const Codec codec = to_codec(codec_number);
  const Floats p(parameters, "parameters", Access::write);
  const Bytes g(gradient, "gradient");
  g.require_count(codec, p.count());
  p.require_apart(g, "gradient");
  const SgdOptions options = {.rate = to_float32(rate, "rate")};
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  table.sgd(p.mutable_data(), g.data(), codec, p.count(), options);
}

void adagrad(py::handle parameters, py::handle accumulator, py::handle gradient, int codec_number,
             double rate, double eps) {
  const Codec codec = to_codec(codec_number);
  const Floats p(parameters, "parameters", Access::write);
  const Floats a(accumulator, "accumulator", Access::write);
  const Bytes g(gradient, "gradient");
  a.require_count(p);
  g.require_count(codec, p.count());
  p.require_apart(a);
  p.require_apart(g, "gradient");
  a.require_apart(g, "gradient");
  const AdagradOptions options = {.rate = to_float32(rate, "rate"), .eps = to_float32(eps, "eps")};
  if (options.eps < 0) {
    throw py::value_error("eps is " + std::to_string(eps) + "; expected at least 0");
  }
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  table.adagrad(p.mutable_data(), a.mutable_data(), g.data(), codec, p.count(), options);
}

std::ptrdiff_t first_non_finite(py::handle gradient, int codec_number) {
  const Codec codec = to_codec(codec_number);
  const Bytes g(gradient, "gradient");
  const std::size_t count = g.count_of(codec);
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  return table.first_non_finite(g.data(), codec, count);
}

void decode(py::handle gradient, int codec_number, py::handle out) {
  const Codec codec = to_codec(codec_number);
  const Bytes g(gradient, "gradient");
  const Floats values(out, "out", Access::write);
  g.require_count(codec, values.count());
  values.require_apart(g, "gradient");
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  table.decode(values.mutable_data(), g.data(), codec, values.count());
}

py::bytes encode(py::handle values, int codec_number) {
  const Codec codec = to_codec(codec_number);
  const Floats v(values, "values", Access::read);
  unsigned char* out = nullptr;
  py::bytes encoded = new_bytes(v.count() * size_of(codec), &out);
  const Kernels& table = kernels();
  {
    py::gil_scoped_release release;
    table.encode(out, v.data(), codec, v.count());
  }
  return encoded;
}

py::tuple summary(py::handle values) {
  const Floats v(values, "values", Access::read);
  const Kernels& table = kernels();
  Summary result;
  {
    py::gil_scoped_release release;
    result = table.summary(v.data(), v.count());
  }
  return py::make_tuple(result.sum_of_squares, result.min, result.max);
}

void bandwidth(py::handle parameters, py::handle accumulator, py::handle gradient) {
  const Floats p(parameters, "parameters", Access::write);
  const Floats a(accumulator, "accumulator", Access::write);
  const Bytes g(gradient, "gradient");
  a.require_count(p);
  g.require_count(Codec::float32, p.count());
  p.require_apart(a);
  p.require_apart(g, "gradient");
  a.require_apart(g, "gradient");
  const Kernels& table = kernels();
  py::gil_scoped_release release;
  table.bandwidth(p.mutable_data(), a.mutable_data(), g.data(), p.count());
}

py::tuple split_frame_of(py::handle message, std::int64_t field_number) {
  const std::uint32_t number = to_field_number(field_number);
  const Bytes bytes(message, "message");
  Frame frame;
  if (bytes.size() < gil_release_size_min) {
    split_frame(bytes.data(), bytes.size(), number, &frame);
  } else {
    py::gil_scoped_release release;
    split_frame(bytes.data(), bytes.size(), number, &frame);
  }
  std::size_t header_size = 0;
  for (const ByteRange& range : frame.header) header_size += range.size;
  unsigned char* out = nullptr;
  py::bytes header = new_bytes(header_size, &out);
  for (const ByteRange& range : frame.header) {
    std::memcpy(out, bytes.data() + range.offset, range.size);
    out += range.size;
  }
  return py::make_tuple(header, frame.payload.offset, frame.payload.size);
}

py::bytes join_frame(const py::bytes& header, std::int64_t field_number, py::handle values,
                     int codec_number) {
  const Codec codec = to_codec(codec_number);
  const std::uint32_t number = to_field_number(field_number);
  const Bytes head(header, "header");
  const Floats v(values, "values", Access::read);
  const std::size_t payload_size = v.count() * size_of(codec);
  unsigned char prefix[payload_prefix_size_max];
  const std::size_t prefix_size = write_payload_prefix(number, payload_size, prefix);
  const std::size_t total = head.size() + prefix_size + payload_size;
  if (total > INT32_MAX) {
    throw py::value_error("the message would take " + std::to_string(total) +
                          " bytes; protobuf's limit is 2 GiB");
  }
  unsigned char* out = nullptr;
  py::bytes message = new_bytes(total, &out);
  const Kernels& table = kernels();
  {
    py::gil_scoped_release release;
    std::memcpy(out, head.data(), head.size());
    std::memcpy(out + head.size(), prefix, prefix_size);
    table.encode(out + head.size() + prefix_size, v.data(), codec, v.count());
  }
  return message;
}

}  // namespace
}  // namespace pyps

PYBIND11_MODULE(_kernels, module) {
  using py::arg;
  module.doc() = "The server's native kernels. Every call releases the GIL around its loop.";
  module.attr("FLOAT32") = static_cast<int>(pyps::Codec::float32);
  module.attr("FLOAT16") = static_cast<int>(pyps::Codec::float16);
  module.attr("BFLOAT16") = static_cast<int>(pyps::Codec::bfloat16);

  module.def(
      "isa", [] { return std::string(pyps::kernels().isa); },
      "Names the instruction set in use; PYPS_ISA, read at the first call, overrides it.");
  module.def("available", &pyps::available_isas,
             "Names the instruction sets of this build and processor, narrowest first.");
  module.def("select", &pyps::select_isa, arg("name"),
             "Switches the instruction set for every caller. For tests.");

  module.def("sgd", &pyps::sgd, arg("parameters"), arg("gradient"), arg("codec"), py::kw_only(),
             arg("rate"), "p = p - rate * g, in place.");
  module.def("adagrad", &pyps::adagrad, arg("parameters"), arg("accumulator"), arg("gradient"),
             arg("codec"), py::kw_only(), arg("rate"), arg("eps"),
             "a = a + g * g; p = p - rate * g / (sqrt(a) + eps), in place; 0 / 0 is 0.");
  module.def("first_non_finite", &pyps::first_non_finite, arg("gradient"), arg("codec"),
             "Returns the index of the first NaN or infinity, -1 when there is none.");
  module.def("decode", &pyps::decode, arg("gradient"), arg("codec"), arg("out"),
             "Writes the encoded values as float32 into `out`.");
  module.def("encode", &pyps::encode, arg("values"), arg("codec"),
             "Returns the values encoded, rounded to nearest, ties to even.");
  module.def("summary", &pyps::summary, arg("values"),
             "Returns (sum of squares in float64, min, max); min and max pass over NaN.");
  module.def("bandwidth", &pyps::bandwidth, arg("parameters"), arg("accumulator"), arg("gradient"),
             "Moves the memory that `adagrad` moves. For benchmarks.");

  module.def("split_frame", &pyps::split_frame_of, arg("message"), arg("field_number"),
             "Returns (the message without its payload field, payload offset, payload size).");
  module.def("join_frame", &pyps::join_frame, arg("header"), arg("field_number"), arg("values"),
             arg("codec") = static_cast<int>(pyps::Codec::float32),
             "Returns header, tag, length and encoded values as one bytes object.");
}
