// Everything from here to `target_end.h` is compiled for the processors of BATON_TARGET. All headers come before it:
// what they define must stay code that every processor can run.
#define BATON_PRAGMA(text) _Pragma(#text)
#define BATON_PRAGMA_OF(text) BATON_PRAGMA(text)
#if defined(__clang__)
BATON_PRAGMA_OF(clang attribute push(__attribute__((target(BATON_TARGET))), apply_to = function))
#else
#pragma GCC push_options
BATON_PRAGMA_OF(GCC target(BATON_TARGET))
#endif
