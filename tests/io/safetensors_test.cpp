// The safetensors format: what is written comes back, and damaged or hostile files are errors that change nothing.
#include <tandem/tensor/io/safetensors.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "support.h"

using namespace tandem;
using namespace tandem::test;

namespace {

std::string with_length(std::uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}
std::string file_of(const std::string& header, std::size_t data_bytes = 0) {
  return with_length(header.size(), header + std::string(data_bytes, '\1'));
}
std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}
Safetensors parse(const std::string& bytes) { return parse_safetensors(std::as_bytes(std::span(bytes))); }

// The error of reading these bytes, which is the same from memory and from a file; no tensor memory may be taken beyond
// the size of the file.
std::string rejection(const std::string& bytes) {
  reset_peak_memory();
  const std::size_t before = memory_stats().in_use;
  std::string error = error_of([&] { parse(bytes); });
  CHECK(memory_stats().peak - before <= bytes.size());
  CHECK(memory_stats().in_use == before);
  const Directory directory;
  const std::string path = directory / "hostile";
  write_bytes(path, bytes);
  std::string from_file = error_of([&] { read_safetensors(path); });
  CHECK(memory_stats().in_use == before);
  if (const auto at = error.find("memory"); at != std::string::npos) error.replace(at, 6, path);
  CHECK(error == from_file);
  CHECK(contains(error, "[load]"));
  return error;
}
#define CHECK_REJECTED(bytes, ...)                                           \
  do {                                                                       \
    const std::string error_ = rejection(bytes);                             \
    for (const std::string& part_ : std::vector<std::string>{__VA_ARGS__}) { \
      INFO(error_);                                                          \
      CHECK(contains(error_, part_));                                        \
    }                                                                        \
  } while (false)

const Tensor& find(const Safetensors& file, const std::string& name) {
  for (const auto& [n, t] : file.tensors)
    if (n == name) return t;
  FAIL("no tensor " << name);
  std::abort();
}

}  // namespace

TEST_CASE("tensors of every type, shape and layout come back in order") {
  const Directory directory;
  const std::string path = directory / "all.safetensors";
  const Tensor matrix = arange(6, {.dtype = float32}).view({2, 3});
  NamedTensors tensors = {{"bool", tensor({true, false, true})},
                          {"uint8", tensor({0, 255}, {.dtype = uint8})},
                          {"int32", tensor({-1, 2147483647}, {.dtype = int32})},
                          {"int64", tensor({{int64_t{-9007199254740993}}})},
                          {"float32", randn({3, 5})},
                          {"float64", randn({2, 1, 2}, {.dtype = float64})},
                          {"bfloat16", tensor({1.5, -2.0, 3.0}).to(bfloat16)},
                          {"float16", tensor({0.5, 65504.0}).to(float16)},
                          {"single", tensor(4.0)},
                          {"empty", zeros({3, 0, 2})},
                          {"transposed", matrix.t()},
                          {"expanded", tensor({7.0}).expand({4})},
                          {"slice", matrix.slice(1, 0, 3, 2)},
                          {"grad", ones({2}).requires_grad_()},
                          {"8 dimensions", ones({1, 1, 1, 2, 1, 1, 1, 1})},
                          {"quote \" slash \\ line \n \xc3\xa4", tensor({1})}};
  write_safetensors(path, tensors, {{"format", "pt"}, {"note", "\"\xe2\x82\xac\""}});
  const Safetensors back = read_safetensors(path);
  CHECK(back.metadata == std::map<std::string, std::string>{{"format", "pt"}, {"note", "\"\xe2\x82\xac\""}});
  REQUIRE(back.tensors.size() == tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    INFO(tensors[i].first);
    CHECK(back.tensors[i].first == tensors[i].first);
    const Tensor &wanted = tensors[i].second, &found = back.tensors[i].second;
    CHECK(found.dtype() == wanted.dtype());
    CHECK(found.shape() == wanted.shape());
    CHECK(found.to_vector<double>() == wanted.to_vector<double>());
    CHECK(!found.requires_grad());
  }
  CHECK(find(back, "int64").item<int64_t>() == -9007199254740993);
  // The same from memory, and nothing is left beside the file.
  CHECK(parse(read_bytes(path)).tensors.size() == tensors.size());
  CHECK(directory.names().size() == 1);
}

TEST_CASE("the bytes are those of the format") {
  const Directory directory;
  const std::string path = directory / "layout";
  write_safetensors(path, {{"a", tensor({true})}, {"b", tensor({1.0f, 2.0f})}, {"c", tensor({int64_t{3}})}});
  const std::string bytes = read_bytes(path);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  CHECK(length % 8 == 0);
  // Wide types come first in the data, so that each tensor is aligned; the header keeps the given order.
  std::string header = R"({"a":{"dtype":"BOOL","shape":[1],"data_offsets":[16,17]},)"
                       R"("b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},)"
                       R"("c":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const char data[] = "\3\0\0\0\0\0\0\0\0\0\x80\x3f\0\0\0\x40\1";
  CHECK(bytes == with_length(header.size(), header + std::string(data, 17)));
}

TEST_CASE("files without tensors, empty tensors and unaligned data are valid") {
  const Directory directory;
  write_safetensors(directory / "none", {});
  CHECK(read_safetensors(directory / "none").tensors.empty());
  CHECK(parse(file_of("{}")).tensors.empty());
  CHECK(parse(file_of("{\"__metadata__\":{}}   ")).tensors.empty());
  const Safetensors file =
      parse(file_of("{" + entry("b", "F32", "[1]", "[1,5]") + "," + entry("e", "F32", "[2,0]", "[1,1]") + "," +
                        entry("a", "U8", "[]", "[0,1]") + " , " + entry("last", "I64", "[0]", "[5,5]") + "}",
                    5));
  CHECK(file.tensors[0].first == "b");
  CHECK(find(file, "e").shape() == Shape{2, 0});
  CHECK(find(file, "a").item<int>() == 1);
  CHECK(find(file, "last").numel() == 0);
}

TEST_CASE("tensors are read to the device asked for") {
  set_cpu_device_count(2);
  const Directory directory;
  write_safetensors(directory / "f", {{"a", tensor({1.0, 2.0}).to("cpu:1")}});
  const Tensor back = read_safetensors(directory / "f", "cpu:1").tensors[0].second;
  CHECK(back.device() == Device("cpu:1"));
  CHECK(back.to_vector<float>() == std::vector<float>{1, 2});
  CHECK_ERROR(read_safetensors(directory / "f", "cpu:7"), "cpu:7");
  set_cpu_device_count(1);
}

// ztxz16/fastllm#712, 0xShug0/audio.cpp PR#138, kekzl/imp#1603, QuintinShaw/openasr PR#73, ollama/ollama PR#17149,
// gomlx PR#57: headers that lie crashed readers or made them allocate what a number in the file said.
TEST_CASE("a header length that lies is an error") {
  CHECK_REJECTED(with_length(UINT64_MAX, "{}"), "byte 0", "length is 18446744073709551615, but only 2 bytes follow",
                 "write it again");
  CHECK_REJECTED(with_length(std::uint64_t{1} << 63, "{}"), "byte 0", "9223372036854775808");
  CHECK_REJECTED(with_length(3, "{}"), "byte 0", "length is 3, but only 2 bytes follow");
  CHECK_REJECTED(with_length(11, "{}"), "byte 0", "length is 11");
  CHECK_REJECTED(with_length(0, ""), "byte 8", "does not start with {");
  CHECK_REJECTED("", "byte 0", "ends before the 8 bytes");
  CHECK_REJECTED("1234567", "byte 7", "ends before the 8 bytes");
}

TEST_CASE("a header longer than 100 MB is refused without reading it") {
  const Directory directory;
  const std::string path = directory / "sparse";
  write_bytes(path, with_length(100'000'001, "{"));
  std::filesystem::resize_file(path, 100'000'100);
  CHECK_ERROR(read_safetensors(path), "byte 0", "100000001", "at most 100000000");
}

TEST_CASE("a file larger than the memory is an error") {
  const Directory directory;
  const std::string path = directory / "sparse";
  const std::string data = std::to_string(1 << 30);
  write_bytes(path, file_of("{" + entry("a", "U8", "[" + data + "]", "[0," + data + "]") + "}"));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) + (1 << 30));
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const std::uint64_t used = pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  if (used >= std::uint64_t{1} << 40) {
    MESSAGE("not checked: sanitizers reserve more address space than can be limited");
    return;
  }
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  const rlimit small{used + (64 << 20), limit.rlim_max};
  setrlimit(RLIMIT_AS, &small);
  const std::string error = error_of([&] { read_safetensors(path); });
  setrlimit(RLIMIT_AS, &limit);
  INFO(error);
  CHECK(contains(error, path + ", byte 79: there is no memory for \"a\" of shape {1073741824}"));
  CHECK(contains(error, "out of memory on cpu:0: 1073741824 bytes were asked for"));
}

TEST_CASE("offsets that do not cover the data exactly once are an error") {
  const std::string eight = "[2]";  // eight bytes of F32
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[-8,0]") + "}", 8), "\"a\" has the negative number -8",
                 "byte 59");
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[8,0]") + "}", 8), "\"a\" ends at 0 before it begins at 8");
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[0,4]") + "}", 4),
                 "\"a\" of shape {2} needs 8 bytes, but has 4");
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[0,8]") + "}", 7), "\"a\" needs data up to 8", "has 7 bytes");
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[18446744073709551608,18446744073709551615]") + "}", 8),
                 "needs data up to 18446744073709551615");
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[0,18446744073709551616]") + "}", 8),
                 "must be two whole numbers");
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[0,8]") + "," + entry("b", "F32", eight, "[4,12]") + "}", 12),
                 "data of \"b\" begins at 4, but what lies before it ends at 8");
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[0,8]") + "," + entry("b", "F32", eight, "[0,8]") + "}", 8),
                 "begins at 0, but what lies before it ends at 8");
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[0,8]") + "," + entry("b", "F32", eight, "[12,20]") + "}", 20),
                 "data of \"b\" begins at 12, but what lies before it ends at 8");
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[4,12]") + "}", 12), "begins at 4", "ends at 0");
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[0,8]") + "}", 11), "byte 70", "but 3 more bytes follow");
  CHECK_REJECTED(file_of("{}", 1), "byte 10", "1 more bytes follow");
  // An empty tensor in the middle of another.
  CHECK_REJECTED(file_of("{" + entry("a", "F32", eight, "[0,8]") + "," + entry("e", "F32", "[0]", "[4,4]") + "}", 8),
                 "data of \"e\" begins at 4");
}

TEST_CASE("shapes whose product overflows are an error") {
  const std::string big = "4611686018427387904";  // 2^62
  CHECK_REJECTED(file_of("{" + entry("a", "F32", "[" + big + "]", "[0,0]") + "}"), "too large");
  CHECK_REJECTED(file_of("{" + entry("a", "U8", "[" + big + ",4]", "[0,0]") + "}"), "too large");
  CHECK_REJECTED(file_of("{" + entry("a", "U8", "[0," + big + "," + big + "]", "[0,0]") + "}"), "too large");
  CHECK_REJECTED(file_of("{" + entry("a", "U8", "[4294967296,4294967296]", "[0,0]") + "}"), "too large");
  CHECK_REJECTED(file_of("{" + entry("a", "U8", "[18446744073709551615]", "[0,0]") + "}"), "too large");
  CHECK_REJECTED(file_of("{" + entry("a", "U8", "[-1]", "[0,0]") + "}"), "negative number -1");
  CHECK_REJECTED(file_of("{" + entry("a", "U8", "[1.0]", "[0,1]") + "}", 1),
                 "shape of \"a\" must be a list of whole numbers");
}

TEST_CASE("more than 8 dimensions and unknown types name the tensor and a remedy") {
  CHECK_REJECTED(file_of("{" + entry("deep", "U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") + "}", 1), "\"deep\"",
                 "more than 8 dimensions", "reshape it");
  CHECK_REJECTED(file_of("{" + entry("a", "F8_E4M3", "[1]", "[0,1]") + "}", 1), "\"a\" has the dtype \"F8_E4M3\"",
                 "convert it to one of F32, F64, I64, I32, U8, BOOL, BF16, F16", "byte 31");
  CHECK_REJECTED(file_of("{" + entry("a", "", "[1]", "[0,1]") + "}", 1), "the dtype \"\"");
}

TEST_CASE("names and fields that occur twice are an error") {
  const std::string a = entry("a", "U8", "[0]", "[0,0]");
  CHECK_REJECTED(file_of("{" + a + "," + a + "}"), "\"a\" occurs twice");
  CHECK_REJECTED(file_of("{" + a + "," + entry("\\u0061", "U8", "[0]", "[0,0]") + "}"), "\"a\" occurs twice");
  CHECK_REJECTED(file_of(R"({"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})"), "dtype of \"a\"",
                 "twice");
  CHECK_REJECTED(file_of(R"({"__metadata__":{"k":"1","k":"2"}})"), "metadata \"k\" occurs twice");
  CHECK_REJECTED(file_of(R"({"__metadata__":{},"__metadata__":{}})"), "\"__metadata__\" occurs twice");
}

TEST_CASE("headers of another form are an error") {
  CHECK_REJECTED(file_of(R"({"a":{"shape":[0],"data_offsets":[0,0]}})"), "\"a\" has no dtype");
  CHECK_REJECTED(file_of(R"({"a":{"dtype":"U8","data_offsets":[0,0]}})"), "\"a\" has no shape");
  CHECK_REJECTED(file_of(R"({"a":{"dtype":"U8","shape":[0]}})"), "\"a\" has no data_offsets");
  CHECK_REJECTED(file_of(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0]}})"), "\"a\" needs two data_offsets");
  CHECK_REJECTED(file_of(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}})"), "\"a\" needs two data_offsets");
  CHECK_REJECTED(file_of(R"({"a":{"dtype":"U8","more":1}})"), "\"a\" has the unknown field \"more\"");
  CHECK_REJECTED(file_of(R"({"a":{"dtype":["U8"]}})"), "dtype of \"a\" must be a string, but there is a list");
  CHECK_REJECTED(file_of(R"({"a":{"dtype":1}})"), "dtype of \"a\" must be a string, but there is a number");
  CHECK_REJECTED(file_of(R"({"a":{"shape":"U8"}})"),
                 "shape of \"a\" must be a list of whole numbers, but there is a string");
  CHECK_REJECTED(file_of(R"({"a":{"shape":0}})"), "shape of \"a\" must be a list");
  CHECK_REJECTED(file_of(R"({"a":{"data_offsets":null}})"),
                 "data_offsets of \"a\" must be two whole numbers, but there is null");
  CHECK_REJECTED(file_of(R"({"a":{"shape":[true]}})"), "there is a truth value");
  CHECK_REJECTED(file_of(R"({"a":1})"),
                 "an object with dtype, shape and data_offsets is expected, but there is a number");
  CHECK_REJECTED(file_of(R"({"__metadata__":{"k":1}})"), "metadata must be strings, but there is a number");
  CHECK_REJECTED(file_of(R"({"__metadata__":["k"]})"), "there is a list");
  CHECK_REJECTED(file_of("[]"), "does not start with {");
  CHECK_REJECTED(file_of("\xef\xbb\xbf{}"), "does not start with {");
  CHECK_REJECTED(file_of(std::string("{}\0{", 4)), "byte 10", "zero byte");
  CHECK_REJECTED(file_of("{} {}"), "byte 12", "not valid JSON");
  CHECK_REJECTED(file_of("{"), "byte 9", "not valid JSON");
  CHECK_REJECTED(file_of("{\"a"), "not valid JSON");
  CHECK_REJECTED(file_of("{\"\xff\":1}"), "not valid JSON");
  CHECK_REJECTED(file_of("{\"a\":{\"shape\":[1e999]}}"), "not valid JSON");
}

TEST_CASE("deep nesting is an error, not a deep recursion") {
  CHECK_REJECTED(file_of("{\"a\":" + std::string(5'000'000, '[')), "byte 14", "there is a list");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  CHECK_REJECTED(file_of(objects), "\"a\" has the unknown field \"a\"");
  CHECK_REJECTED(file_of("{\"a\":{\"shape\":" + std::string(100'000, '[')), "shape of \"a\"", "there is a list");
  CHECK_REJECTED(file_of("{\"a\":{\"dtype\":{"), "dtype of \"a\" must be a string, but there is an object");
}

TEST_CASE("long and strange names are shortened in messages") {
  const std::string error = rejection(file_of("{\"" + std::string(1'000'000, 'n') + "\":1, \"\\u001b[2J\":1}"));
  CHECK(error.size() < 500);
  CHECK_REJECTED(file_of("{\"__metadata__\":{},\"\\u001b[2J\":{\"x\":1}}"), "\"?[2J\"");
  // Never cut inside a character.
  std::string name = std::string(79, 'n') + "\xc3\xa4\xc3\xa4";
  CHECK_REJECTED(file_of("{\"" + name + "\":{\"x\":1}}"), ("\"" + std::string(79, 'n') + "...\""));
}

TEST_CASE("a bool that is neither 0 nor 1 is an error at its byte") {
  std::string bytes = file_of("{" + entry("a", "BOOL", "[3]", "[0,3]") + "}", 3);
  CHECK(parse(bytes).tensors[0].second.to_vector<bool>() == std::vector<bool>{true, true, true});
  bytes.back() = 2;
  CHECK_REJECTED(bytes, ("byte " + std::to_string(bytes.size() - 1)), "a bool must be 0 or 1, but this byte is 2");
}

TEST_CASE("every cut of a valid file is an error") {
  const Directory directory;
  write_safetensors(directory / "f", {{"a", tensor({1.0, 2.0})}, {"b", tensor({1, 2})}}, {{"k", "v"}});
  const std::string bytes = read_bytes(directory / "f");
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const std::string error = error_of([&] { parse(bytes.substr(0, size)); });
    INFO(size, " ", error);
    CHECK(contains(error, "memory, byte "));
  }
}

TEST_CASE("paths that cannot be read are an error with the reason") {
  const Directory directory;
  CHECK_ERROR(read_safetensors(directory / "missing"), "missing cannot be opened: No such file or directory",
              "check the path");
  CHECK_ERROR(read_safetensors(directory / ""), "is not a regular file");
  REQUIRE(mkfifo((directory / "pipe").c_str(), 0600) == 0);
  CHECK_ERROR(read_safetensors(directory / "pipe"), "pipe is not a regular file", "give the path");
}

TEST_CASE("names that cannot be written are an error") {
  const Directory directory;
  const std::string path = directory / "f";
  CHECK_ERROR(write_safetensors(path, {{"a", ones({1})}, {"a", ones({1})}}), "two tensors have the name \"a\"",
              "unique");
  CHECK_ERROR(write_safetensors(path, {{"a", Tensor()}}), "\"a\" is undefined", "assign a value");
  CHECK_ERROR(write_safetensors(path, {{"__metadata__", ones({1})}}), "__metadata__", "choose another");
  CHECK_ERROR(write_safetensors(path, {{"\xff", ones({1})}}), "not UTF-8", "choose another");
  CHECK_ERROR(write_safetensors(path, {}, {{"k", "\xff"}}), "not UTF-8");
  CHECK_ERROR(write_safetensors(path, {{std::string(100'000'000, 'a'), ones({1})}}), "shorten");
  CHECK(directory.names().empty());
}
