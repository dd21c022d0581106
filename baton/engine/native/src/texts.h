// What was said, so that it can be found again: drafts of tokens are made of it (see baton/engine/speculation/text).
//
// A `BatonTexts` has the tokens of texts in suffix automata, in which every part of a text is a path from the root. It
// has two of them, the younger of which grows. When that is full the older one is dropped and an empty one begins: so
// old text goes, nothing is built again, and there are never more than twice `max_tokens` tokens.
//
// A `BatonReader` goes along one text. It follows the longest end of that text that has been in the `BatonTexts` before
// this, and adds the text to it, token by token. Several readers may add texts to one `BatonTexts` at the same time.
//
// Token ids are not negative. Calls that take a `BatonTexts` or one of its readers are made one at a time.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

struct BatonTexts;
struct BatonReader;

// `max_tokens`: what the younger half has before it becomes the older one, 1 to 2^26; `max_texts`: how many texts began
// in it, at least 1. `num_expected`: tokens for which there is room from the beginning. Some 50 to 110 bytes a token, and
// up to twice that where memory has just been doubled. NULL: there is no memory.
BatonTexts* baton_texts_open(int64_t max_tokens, int64_t max_texts, int64_t num_expected);
// No reader of it may be used afterwards, only closed.
void baton_texts_close(BatonTexts* texts);
// The tokens of both halves.
int64_t baton_texts_size(const BatonTexts* texts);

BatonReader* baton_reader_open(BatonTexts* texts);
void baton_reader_close(BatonReader* reader);
// A guess: after the last `match` tokens, the guesses before this one among them, something has followed `total` times,
// and `count` times this token.
struct BatonGuess {
    int32_t token, match, count, total;
};
// The text goes on with `tokens`. Writes the first guess, whose `match` is how many of the last tokens have been in the
// texts before, as one piece; its `count` is 0 where nothing followed them. Returns whether there was memory. Without
// any, neither the texts nor their readers may be used any more, only closed.
int32_t baton_reader_read(BatonReader* reader, const int32_t* tokens, int64_t num_tokens, BatonGuess* first);
// What followed most often, and the newest where several did as often, guess by guess. Where nothing followed, a shorter
// end of the text is taken. Returns the number of guesses, `max_guesses` at most.
int64_t baton_reader_guess(const BatonReader* reader, BatonGuess* guesses, int64_t max_guesses);

}  // extern "C"
#pragma GCC visibility pop
