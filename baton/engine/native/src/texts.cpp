// Texts in two automata of which the younger one grows, and readers that follow them.
#include "texts.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "automaton.h"

namespace baton {
namespace {

// The longest end of a text that is a part in an automaton: the last `length` tokens.
struct Match {
    int32_t state = ROOT, length = 0;

    // States are divided while an automaton grows: the parts of this length may have become those of a link.
    void find_state(const Automaton& automaton) {
        while (state != ROOT && length <= automaton.state(automaton.state(state).link).length)
            state = automaton.state(state).link;
    }

    void shorten(const Automaton& automaton) {
        state = automaton.state(state).link;
        length = automaton.state(state).length;
    }

    void go_on(const Automaton& automaton, int32_t token) {
        find_state(automaton);
        int32_t next;
        while ((next = automaton.after(state, token)) == NOTHING && state != ROOT) shorten(automaton);
        if (next == NOTHING) return;
        state = next;
        ++length;
    }
};

// What followed most often of the newest that followed. A state near the root may have very many edges.
constexpr int32_t MAX_COMPARED = 64;

BatonGuess likeliest(const Automaton& automaton, const Match& match, int32_t* to) {
    BatonGuess best = {0, match.length, 0, 0};
    int32_t place = automaton.state(match.state).first_edge;
    for (int32_t number = 0; place != NOTHING && number < MAX_COMPARED; ++number) {
        const Automaton::Edge& edge = automaton.edge(place);
        const int32_t count = automaton.state(edge.to).count;
        best.total += count;
        if (count > best.count) {
            best.token = edge.token;
            best.count = count;
            *to = edge.to;
        }
        place = edge.next;
    }
    return best;
}

int64_t guess(const Automaton& automaton, Match match, BatonGuess* guesses, int64_t max_guesses) {
    int64_t number = 0;
    match.find_state(automaton);
    while (number < max_guesses && match.state != ROOT) {
        int32_t to = NOTHING;
        const BatonGuess found = likeliest(automaton, match, &to);
        if (to == NOTHING) {
            match.shorten(automaton);
            continue;
        }
        guesses[number++] = found;
        match = {to, match.length + 1};
    }
    return number;
}

}  // namespace
}  // namespace baton

struct BatonTexts {
    BatonTexts(int64_t most_tokens, int64_t most_texts) : max_tokens(most_tokens), max_texts(most_texts) {}

    int64_t max_tokens, max_texts;
    baton::Automaton older, younger;
    int64_t num_texts = 0, generation = 0;  // that began in the younger one; and how often that was dropped

    bool has_room(bool for_new_text) const {
        return younger.num_tokens() < max_tokens && (!for_new_text || num_texts < max_texts);
    }

    void age() {
        older = std::exchange(younger, baton::Automaton());
        num_texts = 0;
        ++generation;
    }
};

struct BatonReader {
    BatonTexts& texts;
    int64_t generation;
    baton::Match in_older, in_younger;
    int32_t end = baton::ROOT;  // of the text, in the younger automaton
    bool has_begun = false;     // there

    void read(int32_t token) {
        if (generation != texts.generation) move_on();
        if (!texts.has_room(!has_begun)) {
            texts.age();
            move_on();
        }
        if (!has_begun) ++texts.num_texts;
        has_begun = true;
        in_older.go_on(texts.older, token);
        in_younger.go_on(texts.younger, token);
        end = texts.younger.add(end, token);
    }

    bool is_in_older() const { return in_older.length > in_younger.length; }
    const baton::Automaton& automaton() const { return is_in_older() ? texts.older : texts.younger; }
    baton::Match longest() const { return is_in_older() ? in_older : in_younger; }

    BatonGuess first_guess() const {
        baton::Match match = longest();
        int32_t to;
        match.find_state(automaton());
        return match.state == baton::ROOT ? BatonGuess{} : baton::likeliest(automaton(), match, &to);
    }

    // What was the younger automaton is the older one now, or is gone.
    void move_on() {
        in_older = generation + 1 == texts.generation ? in_younger : baton::Match();
        in_younger = baton::Match();
        end = baton::ROOT;
        has_begun = false;
        generation = texts.generation;
    }
};

extern "C" {

BatonTexts* baton_texts_open(int64_t max_tokens, int64_t max_texts, int64_t num_expected) {
    try {
        auto texts = std::make_unique<BatonTexts>(max_tokens, max_texts);
        texts->younger.reserve(std::min(num_expected, max_tokens));
        return texts.release();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void baton_texts_close(BatonTexts* texts) { delete texts; }

int64_t baton_texts_size(const BatonTexts* texts) { return texts->older.num_tokens() + texts->younger.num_tokens(); }

BatonReader* baton_reader_open(BatonTexts* texts) {
    return new (std::nothrow) BatonReader{*texts, texts->generation, {}, {}};
}

void baton_reader_close(BatonReader* reader) { delete reader; }

int32_t baton_reader_read(BatonReader* reader, const int32_t* tokens, int64_t num_tokens, BatonGuess* first) {
    try {
        for (int64_t i = 0; i < num_tokens; ++i) reader->read(tokens[i]);
    } catch (const std::bad_alloc&) {
        return 0;
    }
    *first = reader->first_guess();
    return 1;
}

int64_t baton_reader_guess(const BatonReader* reader, BatonGuess* guesses, int64_t max_guesses) {
    if (reader->generation != reader->texts.generation) return 0;
    return baton::guess(reader->automaton(), reader->longest(), guesses, max_guesses);
}

}  // extern "C"
