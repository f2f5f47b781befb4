// Fashion-MNIST and MNIST: from made-up files, and the real one where it is installed.
#include <tandem/data/mnist.h>

#include <tandem/data/idx.h>
#include <tandem/data/loader.h>
#include <tandem/tests/data/files.h>

namespace tandem {
namespace {

using namespace test;
using data::FashionMNIST;

std::vector<int64_t> rows_of(std::initializer_list<int64_t> rows) { return rows; }

TEST_CASE("mnist: train and test files are found, packed or not") {
  const TemporaryFolder folder;
  folder.write("train-images-idx3-ubyte", idx_file({6, 4, 5}));
  folder.write("train-labels-idx1-ubyte", idx_file({6}));
  folder.write("t10k-images-idx3-ubyte.gz", idx_file({3, 4, 5}));  // by name only: the bytes decide
  folder.write("t10k-labels-idx1-ubyte.gz", idx_file({3}));
  CHECK(FashionMNIST({.root = folder.path()}).size() == 6);
  CHECK(FashionMNIST({.root = folder.path(), .train = false}).size() == 3);
  CHECK(data::MNIST({.root = folder.path(), .train = true}).size() == 6);
  CHECK(data::MNIST({.root = folder.path(), .train = false}).size() == 3);
}

TEST_CASE("mnist: pixels become x / 255 exactly and labels int64") {
  const TemporaryFolder folder;
  const data::IdxDataset set(folder.write("images", idx_file({6, 16, 16}, 256)), folder.write("labels", idx_file({6})));
  const auto [x, y] = set.get_batch(rows_of({5, 0, 5}));
  CHECK(x.shape() == Shape{3, 1, 16, 16});
  CHECK(x.dtype() == float32);
  CHECK(y.dtype() == int64);
  CHECK(y.to_vector<int64_t>() == rows_of({5, 0, 5}));
  const std::vector<float> pixels = x.to_vector<float>();
  for (std::size_t i = 0; i < pixels.size(); ++i) CHECK(pixels[i] == static_cast<float>(i % 256) / 255.0f);
  CHECK(set.images().dtype() == uint8);
  CHECK(set.labels().shape() == Shape{6});
}

TEST_CASE("mnist: an example is a batch of one without its first dimension") {
  const TemporaryFolder folder;
  const data::IdxDataset set(folder.write("images", idx_file({6, 4, 5})), folder.write("labels", idx_file({6})));
  const auto [x, y] = set.get(2);
  CHECK(x.shape() == Shape{1, 4, 5});
  CHECK(y.shape() == Shape{});
  CHECK(y.item<int64_t>() == 2);
  CHECK(x.to_vector<float>() == set.get_batch(rows_of({2}))[0].to_vector<float>());
  CHECK(set.get_batch({})[0].shape() == Shape{0, 1, 4, 5});
  CHECK_ERROR(set.get(6), "[IdxDataset] row 6 does not exist", "6 rows");
  CHECK_ERROR(set.get_batch(rows_of({0, -1})), "row -1 does not exist");
}

TEST_CASE("mnist: copies share the data") {
  const TemporaryFolder folder;
  const data::IdxDataset set(folder.write("images", idx_file({6, 4, 5})), folder.write("labels", idx_file({6})));
  const data::IdxDataset copy = set;
  CHECK(copy.images().const_data<std::uint8_t>() == set.images().const_data<std::uint8_t>());
}

TEST_CASE("mnist: missing files say what to install or give") {
  CHECK_ERROR(FashionMNIST({.root = "/nowhere"}), "[FashionMNIST] neither /nowhere/train-images-idx3-ubyte nor",
              "package dataset-fashion-mnist", ".root", "--data");
  CHECK_ERROR(data::MNIST({.root = "/nowhere", .train = false}), "[MNIST] neither /nowhere/t10k-images-idx3-ubyte nor",
              ".root");
  const TemporaryFolder folder;
  folder.write("train-images-idx3-ubyte", idx_file({6, 4, 5}));
  CHECK_ERROR(FashionMNIST({.root = folder.path()}), "train-labels-idx1-ubyte");
}

// deeplearning4j/deeplearning4j#3670 and others of the reports on IDX files: images and labels of different sets.
TEST_CASE("report: unequal numbers of images and labels are an error with both") {
  const TemporaryFolder folder;
  const std::string images = folder.write("images", idx_file({6, 4, 5})),
                    labels = folder.write("labels", idx_file({5}));
  CHECK_ERROR(data::IdxDataset(images, labels), images.c_str(), "holds 6 images", labels.c_str(), "5 labels");
  CHECK_ERROR(data::IdxDataset(labels, images), labels.c_str(), "holds {5}; expected images {n, height, width}");
  CHECK_ERROR(data::IdxDataset(images, images), "holds {6, 4, 5}; expected labels {n}");
}

TEST_CASE("mnist: the real Fashion-MNIST is what it should be") {
  if (!std::filesystem::exists("/usr/share/datasets/fashion-mnist")) {
    MESSAGE("skipped: dataset-fashion-mnist is not installed");
    return;
  }
#if !defined(TANDEM_ZLIB)
  CHECK_ERROR(FashionMNIST({.train = true}), "compressed by gzip", "no zlib");
  return;
#endif
  const FashionMNIST train({.train = true}), test({.train = false});
  CHECK(train.size() == 60000);
  CHECK(test.size() == 10000);
  for (const FashionMNIST& set : {train, test}) {
    std::vector<int64_t> counts(10);
    for (const auto label : set.labels().to_vector<std::uint8_t>()) ++counts.at(label);
    CHECK(counts == std::vector<int64_t>(10, set.size() / 10));
  }
  const auto first = train.get_batch(rows_of({0, 1, 2, 3, 4}))[1];
  CHECK(first.to_vector<int64_t>() == rows_of({9, 0, 0, 3, 0}));
  std::uint64_t sum = 0;
  for (const auto pixel : train.images().to_vector<std::uint8_t>()) sum += pixel;
  CHECK(static_cast<double>(sum) / (60000 * 784) == doctest::Approx(72.94).epsilon(1e-3));  // published: 0.2860 * 255

  int64_t rows = 0;
  for (auto [x, y] : data::DataLoader(test, {.batch_size = 4096, .num_workers = 2})) {
    CHECK(x.shape() == Shape{y.size(0), 1, 28, 28});
    rows += y.size(0);
  }
  CHECK(rows == 10000);
}

}  // namespace
}  // namespace tandem
