# What doxygen reads of a header. It searches headers from the root, not through the build folder's link; it keeps the
# first meaning of a macro for ever, so that each X gets a name of its own; and it cannot place fmt's formatters.
FNR == 1 {
  file = FILENAME
  sub(/.*\//, "", file)
  sub(/\.h$/, "", file)
}
{
  sub(/<tandem\//, "<")
  sub(/struct fmt::formatter/, "struct fmt_formatter")
}
/^#define X\(/ { ++count }
/^#define X\(|^#undef X$|_OPS\(X\)/ && !/^#define TANDEM/ {
  own = "X_" file "_" count
  sub(/^#define X/, "#define " own)
  sub(/^#undef X/, "#undef " own)
  sub(/_OPS\(X\)/, "_OPS(" own ")")
}
{ print }
