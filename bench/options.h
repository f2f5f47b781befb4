// The command line of a benchmark. The parser behind it takes seconds to compile, so one file alone includes it.
#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace bench {

class Options {
 public:
  /// What --help says first.
  explicit Options(const std::string& description);
  ~Options();

  using Number =
      std::variant<int*, std::int64_t*, double*, std::vector<int>*, std::vector<std::int64_t>*, std::vector<double>*>;
  using Word = std::variant<std::string*, std::vector<std::string>*>;
  /// A number from `low` to `high`, or a comma-separated list of such. What `value` holds is the default.
  void number(const char* name, Number value, const char* help, double low = -std::numeric_limits<double>::infinity(),
              double high = std::numeric_limits<double>::infinity());
  /// A word, or a comma-separated list of words, of the choices if there are some.
  void word(const char* name, Word value, const char* help, const std::vector<std::string>& choices = {});
  /// True where `name` is given, false where a name behind "!" is: "--fresh,!--hot".
  void flag(const char* name, bool* value, const char* help);

  /// Reads the command line; then `check` may refuse what does not go together. What it gives is the exit code to end
  /// with at once: after --help, or a mistake, which has been printed.
  std::optional<int> parse(int argc, char** argv, const std::function<void()>& check = {});
  /// Whether an option was on the command line.
  bool given(const char* name) const;
  /// To be called in the check: a mistake in `option`.
  [[noreturn]] void refuse(const char* option, const std::string& why) const;

 private:
  struct Parser;
  std::unique_ptr<Parser> parser_;
};

}  // namespace bench
