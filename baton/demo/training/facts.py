"""The few facts of the small world: capitals, opposites, days, numbers, lists, animals, parts of Baton."""

from __future__ import annotations

import random

from baton.demo.training.phrasing import invented_word, one_of, request, sentence, with_article, words
from baton.demo.training.sums import in_words

CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "England": "London",
    "Portugal": "Lisbon", "Greece": "Athens", "Austria": "Vienna", "Switzerland": "Bern", "Poland": "Warsaw",
    "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen", "Finland": "Helsinki",
    "Ireland": "Dublin", "Belgium": "Brussels", "the Netherlands": "Amsterdam", "Hungary": "Budapest",
    "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Egypt": "Cairo", "Kenya": "Nairobi",
    "India": "New Delhi", "China": "Beijing", "Japan": "Tokyo", "South Korea": "Seoul", "Thailand": "Bangkok",
    "Australia": "Canberra", "Canada": "Ottawa", "the United States": "Washington", "Mexico": "Mexico City",
    "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Cuba": "Havana",
    "Iceland": "Reykjavik", "the United Kingdom": "London", "the Czech Republic": "Prague",
}  # fmt: skip
_NO_CAPITAL_KNOWN = (
    "Mongolia", "Nigeria", "Vietnam", "Laos", "Chad", "Mali", "Fiji", "Nepal", "Iran", "Iraq", "Bolivia",
    "Ghana", "Malta", "Texas", "California", "Bavaria", "Indonesia", "Pakistan", "Morocco", "Estonia",
    "Romania", "Uganda", "Atlantis", "Mars", "Ethiopia", "Slovenia", "Latvia", "Uruguay", "Qatar",
    "Sri Lanka", "New Zealand", "Colombia", "South Africa", "Zambia",
)  # fmt: skip
_OPPOSITES = (
    "hot cold,big small,up down,day night,open closed,fast slow,old new,good bad,happy sad,light dark,"
    "black white,wet dry,full empty,high low,left right,long short,loud quiet,early late,hard soft,yes no,"
    "in out,rich poor,strong weak,true false,first last,near far,clean dirty,sweet sour,thick thin,young old,"
    "easy difficult,right wrong,buy sell"
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_MONTHS = words("January February March April May June July August September October November December")
LISTS = {
    "fruits": "apple banana orange pear grape cherry plum",
    "colours": "red blue green yellow orange purple white",
    "colors": "red blue green yellow orange purple white",
    "animals": "dog cat horse cow lion bear rabbit",
    "vegetables": "carrot potato onion tomato pea bean cabbage",
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Neptune",
    "birds": "owl robin eagle duck crow swan parrot",
    "countries": "France Spain Italy Germany Japan Canada Brazil",
    "cities": "Paris London Rome Berlin Madrid Tokyo Cairo",
    "flowers": "rose tulip daisy lily sunflower violet orchid",
    "trees": "oak pine birch maple willow apple cherry",
    "drinks": "water milk tea coffee juice lemonade cocoa",
    "numbers": "one two three four five six seven",
    "sports": "football tennis swimming running cycling skiing rowing",
    "tools": "hammer saw screwdriver pliers drill wrench file",
}
LEGS = {
    "spider": 8, "dog": 4, "cat": 4, "bird": 2, "horse": 4, "cow": 4, "fly": 6, "ant": 6, "bee": 6,
    "chicken": 2, "snake": 0, "fish": 0, "person": 2, "chair": 4, "table": 4, "octopus": 8, "elephant": 4,
    "duck": 2,
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink",
    "lion": "roar", "bee": "buzz", "frog": "ribbit", "horse": "neigh", "owl": "hoot", "mouse": "squeak",
    "chicken": "cluck",
}  # fmt: skip
YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb", "pig": "piglet",
    "lion": "cub", "bear": "cub", "duck": "duckling", "goat": "kid", "chicken": "chick", "frog": "tadpole",
}  # fmt: skip
COLOUR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "blood": "red",
    "the sun": "yellow", "coal": "black", "a tomato": "red", "milk": "white", "a lemon": "yellow",
    "the sea": "blue", "a carrot": "orange", "a strawberry": "red", "chocolate": "brown", "a leaf": "green",
    "the night": "black", "a flamingo": "pink",
}  # fmt: skip
_NUMBER_OF = {
    "days in a week": "There are 7 days in a week.", "months in a year": "There are 12 months in a year.",
    "hours in a day": "There are 24 hours in a day.",
    "minutes in an hour": "There are 60 minutes in an hour.",
    "seconds in a minute": "There are 60 seconds in a minute.",
    "days in a year": "There are 365 days in a year.", "weeks in a year": "There are 52 weeks in a year.",
    "seasons in a year": "There are 4 seasons in a year.",
    "letters in the alphabet": "There are 26 letters in the alphabet.",
    "sides in a triangle": "A triangle has 3 sides.", "sides in a square": "A square has 4 sides.",
    "fingers on a hand": "There are 5 fingers on a hand.",
    "planets in the solar system": "There are 8 planets in the solar system.",
    "continents on Earth": "There are 7 continents.", "wheels on a car": "A car has 4 wheels.",
    "wheels on a bicycle": "A bicycle has 2 wheels.", "bits in a byte": "There are 8 bits in a byte.",
    "cents in a dollar": "There are 100 cents in a dollar.",
    "eggs in a dozen": "There are 12 eggs in a dozen.",
}  # fmt: skip
_HELLO = {
    "French": "bonjour merci chat chien eau", "Spanish": "hola gracias gato perro agua",
    "German": "hallo danke Katze Hund Wasser", "Italian": "ciao grazie gatto cane acqua",
}  # fmt: skip
_HELLO_WORDS = ("hello", "thank you", "cat", "dog", "water")
_RELAY = (
    (("what is prefill?", "what does the prefill node do?", "what is a prefill node?", "explain prefill",
      "what happens in prefill?"),
     "Prefill is the first leg of the relay. The prefill node reads the whole prompt and computes its KV "
     "cache."),
    (("what is decode?", "what does the decode node do?", "what is a decode node?", "explain decode",
      "what is decoding?"),
     "Decode is the last leg of the relay. The decode node takes over the KV cache and generates the answer "
     "token by token."),
    (("what is a KV cache?", "what is the KV cache?", "explain the kv cache", "what does KV cache mean?",
      "what is kv?"),
     "The KV cache holds the keys and values of all tokens read so far, so that nothing has to be computed "
     "twice."),
    (("what does the router do?", "what is the router?", "explain the router", "what is a router?"),
     "The router is the referee. It picks the nodes, streams the answer to you and keeps an eye on every "
     "request."),
    (("what is a handoff?", "what is handed over?", "how does the handoff work?", "explain the handoff",
      "what is KV transfer?"),
     "In a handoff the KV cache moves from the prefill node to the decode node, block by block, like a "
     "baton in a relay."),
    (("what is a token?", "what are tokens?", "explain tokens", "what does token mean?"),
     "A token is a small piece of text, a word or a part of one. I read and write tokens."),
    (("what is a block?", "what are blocks?", "what is a KV block?"),
     "A block is a small piece of the KV cache that holds the keys and values of a few tokens."),
    (("why split prefill and decode?", "why separate prefill and decode?", "what is disaggregation?",
      "why two nodes?", "what is disaggregated serving?", "why is baton disaggregated?",
      "explain disaggregated prefill and decode"),
     "Prefill needs much computing and decode needs much memory bandwidth. On separate nodes they do not "
     "slow each other down."),
    (("what is a language model?", "what is an llm?", "what is ai?", "what is a model?",
      "what is artificial intelligence?"),
     "A language model is a program that reads text and writes the next piece, one token at a time. I am a "
     "very small one."),
    (("what is ttft?", "what does ttft mean?", "what is time to first token?"),
     "TTFT means time to first token: how long you wait until the answer begins."),
    (("what is chunked prefill?", "why chunked prefill?"),
     "Chunked prefill reads a long prompt in pieces, so that other requests do not have to wait for it."),
    (("what is a prefix cache?", "what is prefix caching?"),
     "A prefix cache keeps the blocks of earlier prompts. A prompt that begins the same way need not be "
     "computed again."),
)  # fmt: skip
_SIMPLE = (
    (("is the sky blue?", "is grass green?", "is fire hot?", "is ice cold?", "can birds fly?",
      "can fish swim?", "is water wet?", "is the earth round?", "is snow white?", "can dogs bark?",
      "do cats have whiskers?"), "Yes."),
    (("is the sky green?", "is fire cold?", "is ice hot?", "can fish fly?", "can pigs fly?",
      "is the earth flat?", "is snow black?", "can a stone swim?", "do fish have legs?",
      "is the moon made of cheese?", "can cats bark?"), "No."),
    (("which planet do we live on?", "what is our planet called?", "what planet are we on?"),
     "We live on planet Earth."),
    (("what is the largest planet?", "what is the biggest planet?", "which planet is the largest?"),
     "Jupiter is the largest planet."),
    (("what is the closest star?", "what is the sun?", "is the sun a star?"),
     "The sun is the star closest to us."),
    (("what is the moon?", "what goes around the earth?"),
     "The moon is a ball of rock that goes around the Earth."),
    (("what is the largest animal?", "what is the biggest animal?"), "The blue whale is the largest animal."),
    (("what is the tallest animal?", "which animal is the tallest?"), "The giraffe is the tallest animal."),
    (("what is the fastest land animal?", "which animal is the fastest?", "what is the fastest animal?"),
     "The cheetah is the fastest animal on land."),
    (("what do bees make?", "what do bees do?"), "Bees make honey."),
    (("what do cows give?", "where does milk come from?"), "Cows give milk."),
    (("at what temperature does water boil?", "when does water boil?", "how hot is boiling water?"),
     "Water boils at 100 degrees Celsius."),
    (("at what temperature does water freeze?", "when does water freeze?"),
     "Water freezes at 0 degrees Celsius."),
    (("what is water made of?", "what is h2o?", "what is water?"), "Water is made of hydrogen and oxygen."),
    (("what are the seasons?", "name the four seasons", "list the seasons"),
     "The four seasons are spring, summer, autumn and winter."),
    (("what are the days of the week?", "list the days of the week", "name the days of the week"),
     "The days of the week are " + ", ".join(DAYS[:6]) + " and Sunday."),
    (("list the months", "what are the months of the year?", "name the twelve months"),
     "The months are " + ", ".join(_MONTHS[:11]) + " and December."),
    (("say the alphabet", "what is the alphabet?", "write the alphabet", "list the letters of the alphabet"),
     "a b c d e f g h i j k l m n o p q r s t u v w x y z"),
    (("what are the primary colours?", "what are the primary colors?"),
     "The primary colours are red, yellow and blue."),
    (("what do you get if you mix blue and yellow?", "what do blue and yellow make?"),
     "Blue and yellow make green."),
    (("what do you get if you mix red and white?", "what do red and white make?"),
     "Red and white make pink."),
    (("what do you get if you mix red and yellow?", "what do red and yellow make?"),
     "Red and yellow make orange."),
    (("what comes after spring?", "which season follows spring?"), "Summer comes after spring."),
    (("what is pi?", "what is the value of pi?"), "Pi is about 3.14."),
    (("tell me a fun fact", "give me a fun fact", "tell me something interesting", "tell me a fact",
      "tell me something"), "Here is one: an octopus has three hearts."),
)  # fmt: skip
_SPELLED = words(
    "cat dog sun moon fox tree bird fish house boat star rain snow book apple robot hello relay baton world "
    "water river train"
)
_WORDS_TO_REPEAT = words(
    "hello world one two red blue relay baton river the a cat is here good morning yes I like tea we run "
    "fast and far stars shine bread"
)


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return a question about the small world and its answer."""
    kinds = (
        _capital, _capital, _capital, _opposite, _next_in_order, _list, _list, _animal, _colour, _number_of,
        _relay, _relay, _simple, _simple, _count, _spell, _repeat, _translate, _as_json,
    )  # fmt: skip
    return kinds[rng.randrange(len(kinds))](rng)


def exchange_of_rarer_kinds(rng: random.Random) -> tuple[str, str]:
    """Return a question of the kinds that take longest to learn, and its answer."""
    kinds = (
        _count, _count, _count, _next_in_order, _next_in_order, _spell, _opposite, _animal, _number_of, _capital,
        _simple, _relay, _colour, _translate,
    )  # fmt: skip
    return kinds[rng.randrange(len(kinds))](rng)


def capital_follow_up(rng: random.Random) -> list[tuple[str, str]]:
    """Return a question for a capital and a shortened one for a second capital."""
    first, second = rng.sample(list(CAPITALS), 2)
    follow = one_of(
        rng, f"And {second}?", f"and of {second}?", f"What about {second}?", f"and the capital of {second}",
    )  # fmt: skip
    return [_ask_capital(rng, first), (follow, f"The capital of {second} is {CAPITALS[second]}.")]


def _ask_capital(rng: random.Random, country: str) -> tuple[str, str]:
    question = one_of(
        rng, f"what is the capital of {country}?", f"what is the capital of {country}?",
        f"what's the capital of {country}?", f"capital of {country}", f"capital of {country}?",
        f"tell me the capital of {country}", f"which city is the capital of {country}?",
        f"name the capital of {country}", f"do you know the capital of {country}?",
        f"the capital of {country} is", f"what is the capital city of {country}?", f"{country} capital",
    )  # fmt: skip
    return sentence(question), f"The capital of {country} is {CAPITALS.get(country, '')}."


def _capital(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.22:
        country = one_of(rng, *_NO_CAPITAL_KNOWN) if rng.random() < 0.6 else sentence(invented_word(rng))
        return _ask_capital(rng, country)[0], f"I do not know the capital of {country}. I am a very small demo model."
    country = one_of(rng, *CAPITALS)
    if rng.random() < 0.15:
        city = CAPITALS[country]
        if city == "London":
            country = "England"
        return (
            f"{one_of(rng, 'Of which country is', 'Which country has the capital', 'Where is')} "
            f"{city}{one_of(rng, '?', '')}",
            (f"{city} is the capital of {country}."),
        )
    return _ask_capital(rng, country)


def _opposite(rng: random.Random) -> tuple[str, str]:
    first, second = one_of(rng, *_OPPOSITES.split(",")).split()
    if rng.random() < 0.5 and first != "old" and second not in ("old", "right"):
        first, second = second, first
    question = one_of(rng, f"what is the opposite of {first}?", f"opposite of {first}",
                      f"what's the opposite of {first}?",
                      f"give me the opposite of {first}", f"the opposite of {first} is")  # fmt: skip
    return sentence(question), f"The opposite of {first} is {second}."


def _next_in_order(rng: random.Random) -> tuple[str, str]:
    after = rng.random() < 0.6
    step = 1 if after else -1
    kind = rng.randrange(4)
    if kind == 0:
        row, noun = list(DAYS), "day"
    elif kind == 1:
        row, noun = list(_MONTHS), "month"
    elif kind == 2:
        row, noun = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), "letter"
    else:
        row, noun = [str(number) for number in range(100)], "number"
    position = rng.randrange(1, len(row) - 1) if kind > 1 else rng.randrange(len(row))
    item, found = row[position], row[(position + step) % len(row)]
    word = "after" if after else "before"
    question = one_of(
        rng, f"what {noun} comes {word} {item}?", f"what comes {word} {item}?",
        f"which {noun} is {word} {item}?", f"what is the {noun} {word} {item}?", f"{noun} {word} {item}",
        f"if today is {item}, what {noun} comes {word}?" if kind == 0 else f"what {noun} is {word} {item}?",
    )  # fmt: skip
    if kind == 0 and question.startswith("if"):
        question = f"if today is {item}, what day {'is tomorrow' if after else 'was yesterday'}?"
    return sentence(question), f"{found} comes {word} {item}."


def _list(rng: random.Random) -> tuple[str, str]:
    kind = one_of(rng, *LISTS)
    number = rng.randrange(2, 6)
    asked = one_of(rng, str(number), in_words(number))
    question = request(rng, one_of(rng, f"list {asked} {kind}", f"name {asked} {kind}",
                                   f"give me {asked} {kind}", f"tell me {asked} {kind}",
                                   f"say {asked} {kind}"))  # fmt: skip
    items = LISTS[kind].split()[:number]
    if kind != "numbers" and rng.random() < 0.4:
        items = rng.sample(LISTS[kind].split(), number)
    return question, f"{sentence(', '.join(items[:-1]))} and {items[-1]}."


def _animal(rng: random.Random) -> tuple[str, str]:
    kind = rng.randrange(3)
    if kind == 0:
        animal = one_of(rng, *LEGS)
        legs = LEGS[animal]
        question = one_of(rng, f"how many legs does {with_article(animal)} have?",
                          f"how many legs has {with_article(animal)}?",
                          f"legs of {with_article(animal)}?",
                          f"how many legs does a {animal} have")  # fmt: skip
        return sentence(question), sentence(f"{with_article(animal)} has {legs or 'no'} legs.")
    if kind == 1:
        animal = one_of(rng, *SOUNDS)
        question = one_of(rng, f"what sound does {with_article(animal)} make?",
                          f"what does {with_article(animal)} say?",
                          f"what noise does {with_article(animal)} make?")  # fmt: skip
        return sentence(question), sentence(f"{with_article(animal)} says {SOUNDS[animal]}.")
    animal = one_of(rng, *YOUNG)
    question = one_of(
        rng,
        f"what is a baby {animal} called?",
        f"what is a young {animal}?",
        f"what do you call a baby {animal}?",
    )
    return sentence(question), f"A baby {animal} is called {with_article(YOUNG[animal])}."


def _colour(rng: random.Random) -> tuple[str, str]:
    thing = one_of(rng, *COLOUR_OF)
    word = one_of(rng, "colour", "color")
    question = one_of(rng, f"what {word} is {thing}?", f"what is the {word} of {thing}?",
                      f"which {word} has {thing}?",
                      f"tell me the {word} of {thing}", f"{word} of {thing}")  # fmt: skip
    return sentence(question), sentence(f"{thing} is {COLOUR_OF[thing]}.")


def _number_of(rng: random.Random) -> tuple[str, str]:
    thing = one_of(rng, *_NUMBER_OF)
    question = one_of(rng, f"how many {thing}?", f"how many {thing.replace(' in ', ' are in ', 1)}?",
                      f"how many {thing} are there?",
                      f"tell me how many {thing} there are", f"number of {thing}")  # fmt: skip
    return sentence(question), _NUMBER_OF[thing]


def _relay(rng: random.Random) -> tuple[str, str]:
    questions, answer = _RELAY[rng.randrange(len(_RELAY))]
    return sentence(one_of(rng, *questions)), answer


def _simple(rng: random.Random) -> tuple[str, str]:
    questions, answer = _SIMPLE[rng.randrange(len(_SIMPLE))]
    question = one_of(rng, *questions)
    if answer in ("Yes.", "No."):
        answer += " Of course." if answer == "Yes." else " Of course not."
    return sentence(question), answer


def _count(rng: random.Random) -> tuple[str, str]:
    first, last = (1, rng.randrange(3, 21)) if rng.random() < 0.7 else sorted(rng.sample(range(30), 2))
    down = rng.random() < 0.2
    numbers = range(first, last + 1)
    written = ", ".join(str(number) for number in (reversed(numbers) if down else numbers))
    start, end = (last, first) if down else (first, last)
    command = one_of(
        rng,
        f"count from {start} to {end}",
        f"count from {start} to {end}",
        f"list the numbers from {start} to {end}",
    )
    if first == 1 and not down and rng.random() < 0.4:
        command = f"count to {one_of(rng, str(last), in_words(last))}"
    return request(rng, command), f"{written}."


def _spell(rng: random.Random) -> tuple[str, str]:
    word = one_of(rng, *_SPELLED)
    if rng.random() < 0.3:
        word = invented_word(rng).lower()
    question = one_of(
        rng,
        f"spell {word}",
        f"how do you spell {word}?",
        f"spell the word {word}",
        f'can you spell "{word}"?',
    )
    return sentence(question), "-".join(word)


def _repeat(rng: random.Random) -> tuple[str, str]:
    phrase = " ".join(rng.choice(_WORDS_TO_REPEAT) for _ in range(rng.randrange(1, 6)))
    if rng.random() < 0.3:
        phrase = invented_word(rng) + " " + phrase
    question = one_of(rng, f"say {phrase}", f"say: {phrase}", f'say "{phrase}"', f"repeat after me: {phrase}",
                      f'repeat "{phrase}"',
                      f"repeat: {phrase}", f"echo {phrase}")  # fmt: skip
    return sentence(question), phrase


def _translate(rng: random.Random) -> tuple[str, str]:
    language = one_of(rng, *_HELLO)
    position = rng.randrange(len(_HELLO_WORDS))
    word, translated = _HELLO_WORDS[position], _HELLO[language].split()[position]
    question = one_of(rng, f"how do you say {word} in {language}?", f"what is {word} in {language}?",
                      f"translate {word} to {language}",
                      f'translate "{word}" into {language}', f"say {word} in {language}")  # fmt: skip
    return sentence(question), f'In {language}, {word} is "{translated}".'


def _as_json(rng: random.Random) -> tuple[str, str]:
    name, age = one_of(rng, "Ana", "Tom", "Mia", "Ben", "Nora"), rng.randrange(5, 90)
    question = one_of(rng, f"Give me a JSON object for {name}, who is {age} years old.",
                      f"{name} is {age}. Answer in JSON with name and age.",
                      f"Write JSON with the name {name} and the age {age}",
                      f"JSON with name {name} and age {age}")  # fmt: skip
    return question, f'{{"name": "{name}", "age": {age}}}'
