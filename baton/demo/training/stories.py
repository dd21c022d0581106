"""Short stories and rhymes, put together from plots with free places for hero, name, place, thing and mood.

A plot is a list of steps, each with several wordings that fit every wording of the steps before, so that each
story stays coherent. What the request names (hero, name, place, thing) is always what the story is about.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from baton.demo.training.phrasing import invented_word, one_of, request, sentence, with_article

HEROES = (
    "fox", "robot", "girl", "boy", "cat", "dog", "mouse", "bear", "rabbit", "dragon", "owl", "hedgehog",
    "turtle", "sailor", "wolf", "bird", "frog", "duck", "horse", "lion", "elephant", "penguin", "squirrel",
    "fish", "knight", "princess", "king", "wizard", "baker", "farmer", "fisherman", "painter", "pirate",
    "astronaut", "doctor", "monkey", "bee", "snail", "goat", "sheep", "cow", "pig", "whale", "dolphin",
    "crow", "goose", "otter", "badger", "deer", "unicorn", "ghost", "giant", "witch", "teacher", "clockmaker",
    "old man", "old woman", "child", "spider", "ant", "tiger", "panda", "koala", "kangaroo", "seal", "crab",
    "gardener", "queen", "prince", "little train", "snowman", "computer", "toaster", "teddy bear", "parrot",
    "dinosaur", "alien", "mermaid", "chicken", "runner",
)  # fmt: skip
HER_NAMES = (
    "Mira", "Ana", "Lena", "Nora", "Ida", "Luna", "Ella", "Rosa", "Tilda", "Mia", "Clara", "Zoe", "Ruby",
    "Alice", "Lucy", "Anna", "Lily", "Maria", "Yuki", "Sara", "Nina", "Julia", "Emma", "Sofia", "Eva", "Olga",
    "Lisa", "Maya", "Kate", "Grace", "Amy", "Priya", "Fatima", "Ingrid", "Laura", "Hannah",
)  # fmt: skip
HIS_NAMES = (
    "Tom", "Finn", "Pip", "Oskar", "Ben", "Max", "Leo", "Sam", "Emil", "Jack", "Otto", "Hugo", "Milo", "Bob",
    "Theo", "Felix", "Noah", "Kim", "Ravi", "Juan", "Omar", "Ivan", "Peter", "Paul", "David", "Adam", "Mark",
    "Ali", "Carl", "John", "Liam", "Tim", "Jonas", "Chen", "Diego", "Marco", "Alex", "Daniel",
)  # fmt: skip
_RARE_HEROES = (
    "banana", "cloud", "shoe", "car", "pizza", "tree", "star", "pencil", "chair", "river", "cook", "dancer",
    "nurse", "soldier", "detective", "ninja", "zebra", "camel", "beetle", "worm", "butterfly", "potato",
    "lamp", "leaf", "window", "mountain", "student", "singer", "programmer", "server", "GPU", "token",
    "donkey", "hamster", "sloth", "shark", "octopus", "giraffe", "cactus", "cookie", "bus", "truck",
    "tractor", "submarine", "rocket", "cowboy", "monster", "vampire", "fairy", "elf", "troll", "mayor",
    "judge", "shepherd", "miner", "beaver", "raven", "swan", "hen", "moth", "lizard", "snake", "rat", "bat",
    "sock",
)  # fmt: skip
_PLURAL_IN_S = (
    "robot", "dragon", "cat", "dog", "bear", "rabbit", "owl", "turtle", "frog", "duck", "horse", "lion",
    "penguin", "squirrel", "knight", "pirate", "wizard", "ghost", "unicorn", "dinosaur", "alien", "astronaut",
    "monkey", "bird", "king", "giant",
)  # fmt: skip
NAMES = HER_NAMES + HIS_NAMES
_SHE = ("girl", "princess", "witch", "old woman", "queen", "mermaid", "cow", "chicken")
_HE = ("boy", "king", "wizard", "fisherman", "old man", "prince", "snowman")
PLACES = (
    "in a quiet forest", "by the sea", "in a small village", "on a green hill", "near a wide river",
    "on a tiny island", "in the mountains", "at the edge of a lake", "in a big city", "in an old garden",
    "in a snowy valley", "in a sleepy harbour town", "in the desert", "on the moon", "in an old castle",
    "on a farm", "under a tall oak tree", "in a cold northern land", "in space", "in a little house",
)  # fmt: skip
THINGS = (
    "lantern", "kite", "drum", "map", "key", "scarf", "bell", "book", "umbrella", "clock", "bicycle",
    "compass", "shell", "teapot", "violin", "ring", "hat", "letter", "mirror", "candle", "flute", "basket",
    "blanket", "stone", "coin", "balloon", "ball", "feather", "boat", "telescope", "camera", "spoon", "box",
    "crown", "bottle", "apple", "guitar",
)  # fmt: skip
_WEATHER = ("windy", "rainy", "sunny", "foggy", "cold", "warm", "stormy", "bright", "grey", "snowy")
_MOODS = (
    "curious",
    "shy",
    "brave",
    "cheerful",
    "quiet",
    "clever",
    "kind",
    "stubborn",
    "lonely",
    "patient",
    "tiny",
    "dreamy",
)
_COLOURS = ("red", "blue", "green", "golden", "silver", "yellow", "old", "small", "white", "shiny")


@dataclass(frozen=True)
class Story:
    """What one story is about; `pronoun` is she or he."""

    hero: str
    name: str
    friend: str
    friend_name: str
    place: str
    thing: str
    plot: str
    pronoun: str


_OPENINGS = (
    "Once upon a time, {a_mood_hero} named {name} lived {place}.",
    "Once upon a time there was {a_mood_hero} named {name} who lived {place}.",
    "There once was {a_mood_hero} named {name} who lived {place}.",
    "Long ago, {a_mood_hero} named {name} lived {place}.",
)

_PLOTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "lost": (
        ("{name} owned {a_colour_thing} and took it everywhere.",
         "The thing {name} loved most was {a_colour_thing}."),
        ("One {weather} morning the {thing} was gone.",
         "One {weather} day the {thing} was nowhere to be found."),
        ("{name} looked under the bed, behind the door and along the path, but found nothing.",
         "{They} searched the whole day and found only dust and leaves.",),
        ("Then {a_friend} named {friend_name} came by and asked what was wrong.",
         "At noon {a_friend} named {friend_name} stopped and offered to help.",),
        ("Together they followed small footprints in the mud until they came to an old tree.",
         "Side by side they walked along the stream until they came to an old tree.",),
        ("There was the {thing}, hanging on a branch where the wind had left it.",
         "There sat a young bird that had made its nest inside the {thing}.",),
        ("{name} laughed and said, \"Now it has a good home, and I have a new friend.\"",
         "{name} smiled and thanked {friend_name} with all {their} heart.",),
        ("From that day on, {name} and {friend_name} were never apart for long.",
         "They walked home together and shared a warm supper. The end.",),
    ),
    "lighthouse": (
        ("Every night {name} climbed the stairs of the lighthouse and lit the great lamp.",
         "{Their} work was to keep the lamp of the lighthouse burning.",),
        ("One {weather} night the lamp went out, and a ship was still far out at sea.",
         "One {weather} night the wind blew out the lamp while a ship was coming home.",),
        ("{name} was afraid, but there was no time to wait.",
         "{name} took a deep breath and ran up the stairs."),
        ("{They} lit a small candle, held it behind the big glass, and waved it slowly.",
         "{They} struck a match, lit every candle {they} could find, and put them all in the window.",),
        ("Out on the water, {a_friend} named {friend_name} saw the tiny light and turned the ship.",
         "On the ship, {a_friend} named {friend_name} saw the glow and steered away from the rocks.",),
        ("In the morning the ship lay safe in the harbour.",
         "When the sun rose, everyone was safe on the shore."),
        ("\"Your light was small,\" said {friend_name}, \"but it was exactly enough.\"",
         "{friend_name} came to the door and said, \"Thank you for waking up the dark.\"",),
        ("{name} slept all day, and at dusk {they} lit the lamp again.",
         "And since that night the lamp has never gone out again.",),
    ),
    "race": (
        ("Every summer there was a great race, and {name} wanted to win it.",
         "{name} loved to run, and the great race was only a day away.",),
        ("On a {weather} morning everybody stood at the line, and next to {name} stood {a_friend} named "
         "{friend_name}.",
         "The day of the race was {weather}. The fastest of all was {a_friend} named {friend_name}.",),
        ("The whistle blew, and off they went.", "One, two, three, and they were off."),
        ("Half way up the hill {friend_name} slipped and fell.",
         "At the bridge {friend_name} stumbled and hurt a foot."),
        ("{name} could have run on, but {they} stopped and held out a hand.",
         "{name} looked at the finish, looked back, and turned around to help.",),
        ("They went the last part together, one leaning on the other.",
         "\"Take this baton,\" said {name}, \"and we will run it as a relay.\"",),
        ("They came in last, and the crowd cheered louder than for the winner.",
         "They crossed the line side by side, and everybody clapped.",),
        ("That evening they shared one prize: a big cake with two forks.",
         "{name} did not win a medal that day, but {they} won a friend.",),
    ),
    "boat": (
        ("{name} had built a little boat from old wood and {a_colour} sail.",
         "On the beach {name} had found a little boat with {a_colour} sail.",),
        ("One {weather} morning {they} sailed out to see what was behind the horizon.",
         "One {weather} day {they} pushed it into the water and sailed away.",),
        ("For hours there was nothing but waves and gulls.",
         "The waves rocked the boat, and the land grew small."),
        ("Then a thick fog came, and {name} could not see the way home.",
         "Suddenly the wind turned, and {name} did not know where {they} was.",),
        ("Then a voice called across the water. It was {a_friend} named {friend_name}, sitting on a rock.",
         "On a small rock sat {a_friend} named {friend_name}, who knew every star.",),
        ("{name} shared {their} bread, and {friend_name} pointed out the way.",
         "\"Come aboard,\" said {name}, and {friend_name} showed the way by the stars.",),
        ("Soon they heard the bells of the harbour.", "Before night they saw the lights of home."),
        ("Now there are always two of them in the little boat.",
         "{name} painted a new name on the boat that night. It was \"{friend_name}\".",),
    ),
    "robot": (
        ("{name} could count, sweep and carry, but {they} could not sing.",
         "{name} knew how to do many things, but nobody had ever taught {them} to sing.",),
        ("One {weather} evening {they} heard {a_friend} named {friend_name} sing by an open window.",
         "One {weather} evening a song came over the wall. It was sung by {a_friend} named {friend_name}.",),
        ("\"Can I learn that?\" asked {name}.", "\"How do you do that?\" {name} asked."),
        ("\"Everybody can,\" said {friend_name}. \"Start with one note.\"",
         "\"You begin with one note,\" said {friend_name}, \"and then you add another.\"",),
        ("The first note sounded like a rusty door.", "The first try sounded like a bag of spoons."),
        ("But {name} practised every day, and the notes grew soft and clear.",
         "{name} tried again the next day, and the day after, and slowly it became a tune.",),
        ("In spring the whole neighbourhood stopped to listen.",
         "By winter people came from far away to hear the two of them."),
        ("\"One note at a time,\" said {name}, and {they} sang the next one.",
         "And whenever somebody said \"I cannot\", {name} answered, \"Start with one note.\"",),
    ),
    "seed": (
        ("One {weather} day {name} found a seed no bigger than a crumb.",
         "On a {weather} afternoon the wind dropped a tiny seed at {their} door.",),
        ("{They} put it into the ground and gave it water.",
         "{They} planted it in a pot and set it in the sun."),
        ("Nothing happened for a week, and nothing happened for a month.",
         "Days went by, and the earth stayed brown and bare."),
        ("\"It is only a stone,\" said {a_friend} named {friend_name}.",
         "{A_friend} named {friend_name} laughed and said, \"You are watering dust.\"",),
        ("But {name} came back every morning with a little water.",
         "{name} only smiled and kept watering it."),
        ("Then one morning there was a green tip, thin as a thread.",
         "Then, after the first warm rain, a small green leaf looked out."),
        ("By autumn it was a tree, full of sweet apples.",
         "It grew and grew until it gave shade to the whole yard."),
        ("{name} gave the first fruit to {friend_name}, and both of them laughed.",
         "\"Patience is water too,\" said {name}, and {friend_name} nodded.",),
    ),
    "dark": (
        ("{name} was not afraid of anything except the dark.",
         "All day {name} was happy, but {they} feared the night."),
        ("One {weather} evening {they} had to go home alone through the trees.",
         "One {weather} night the lamp was empty, and the house was black as ink.",),
        ("Something rustled, and {name} held {their} breath.",
         "Something tapped, and {name} pulled the blanket up."),
        ("It was only {a_friend} named {friend_name}, who was looking for {a_colour_thing}.",
         "\"Do not worry,\" said a voice. \"I am {friend_name}, {a_friend}, and I lost {a_colour_thing}.\"",),
        ("\"Are you not afraid?\" asked {name}.", "\"How can you see?\" whispered {name}."),
        ("\"Look up,\" said {friend_name}. Above them shone a thousand stars.",
         "\"Wait a little,\" said {friend_name}, \"and your eyes will find the stars.\"",),
        ("They found the {thing} together in the silver light.",
         "By the light of the moon they found the {thing} in the grass."),
        ("Since then {name} goes out every clear night to say hello to the stars.",
         "After that the dark was just the place where the stars live.",),
    ),
    "bridge": (
        ("A river cut {their} road in two, and the old bridge had fallen.",
         "One {weather} night the flood had taken the only bridge.",),
        ("On the other side lived {a_friend} named {friend_name}, and the two missed each other.",
         "Across the water stood {a_friend} named {friend_name} and waved sadly.",),
        ("\"Let us build a new one,\" called {name}.",
         "{name} had an idea and called, \"We will build from both sides!\""),
        ("Every day {name} laid one stone from this side, and {friend_name} laid one stone from the other.",
         "Stone by stone they worked, one from the left and one from the right.",),
        ("It rained, and it was slow, and their hands grew tired.",
         "Sometimes a stone rolled away, and they began again."),
        ("At last there was only one gap left in the middle.", "After many days one last stone was missing."),
        ("They set the last stone together and shook hands above the water.",
         "{name} and {friend_name} lifted the last stone together and put it in its place.",),
        ("Now everybody crosses there, and they call it the Bridge of Two.",
         "That night they danced on the bridge until the moon went down.",),
    ),
    "letter": (
        ("{name} was given an important letter to carry over the hills.",
         "One {weather} morning {name} was asked to bring {a_colour_thing} to the far end of the land.",),
        ("The road was long, and soon it began to rain.",
         "{They} ran until {their} legs were tired and the sky grew dark."),
        ("At the crossroads sat {a_friend} named {friend_name}, fresh and rested.",
         "Half way there {they} met {a_friend} named {friend_name}.",),
        ("\"Give it to me,\" said {friend_name}. \"I will carry it the second half.\"",
         "\"You have done your leg,\" said {friend_name}. \"Let me run the next one.\"",),
        ("{name} was not sure, but then {they} handed it over carefully.",
         "{name} thought about it and handed it over with both hands."),
        ("{friend_name} ran like the wind, and nothing was dropped on the way.",
         "And {friend_name} ran and ran, and held it tight.",),
        ("It arrived before sunrise, dry and whole.", "It came to the right door at the right time."),
        ("\"Nobody runs alone,\" they said later, and they became a team.",
         "Since then the two of them share every long road.",),
    ),
}  # fmt: skip

_TOPIC_PLOTS = {
    "a lighthouse": "lighthouse", "a storm at sea": "lighthouse", "a race": "race", "a relay race": "race",
    "running": "race", "a boat": "boat", "the sea": "boat", "a song": "robot", "music": "robot",
    "a seed": "seed", "a tree": "seed", "a garden": "seed", "patience": "seed", "the night": "dark",
    "the stars": "dark", "the dark": "dark", "the moon": "dark", "fear": "dark", "a bridge": "bridge",
    "a river": "bridge", "working together": "bridge", "a letter": "letter", "a messenger": "letter",
    "a relay": "letter", "friendship": "lost", "friends": "lost", "a lost thing": "lost", "a journey": "boat",
    "an adventure": "boat", "being brave": "dark", "helping": "race",
}  # fmt: skip


def random_story(rng: random.Random) -> Story:
    """Choose what a story is about."""
    hero, friend = rng.sample(HEROES, 2)
    name, friend_name = _name_for(rng, hero), _name_for(rng, friend)
    while friend_name == name:
        friend_name = _name_for(rng, friend)
    return Story(
        hero=hero,
        name=name,
        friend=friend,
        friend_name=friend_name,
        place=one_of(rng, *PLACES),
        thing=one_of(rng, *THINGS),
        plot=one_of(rng, *_PLOTS),
        pronoun="she" if name in HER_NAMES else "he",
    )


def _name_for(rng: random.Random, hero: str) -> str:
    if hero in _SHE:
        return one_of(rng, *HER_NAMES)
    return one_of(rng, *(HIS_NAMES if hero in _HE else NAMES))


def tell(rng: random.Random, story: Story) -> str:
    """Write the story: 70 to 140 words, a beginning, a trouble and an ending."""
    they, them, their = ("she", "her", "her") if story.pronoun == "she" else ("he", "him", "his")
    colour = one_of(rng, *_COLOURS)
    mood = one_of(rng, *_MOODS)
    words = {
        "name": story.name, "friend_name": story.friend_name, "place": story.place, "thing": story.thing,
        "weather": one_of(rng, *_WEATHER), "a_mood_hero": with_article(f"{mood} {story.hero}"),
        "a_colour_thing": with_article(f"{colour} {story.thing}"), "a_colour": with_article(colour),
        "a_friend": with_article(story.friend), "A_friend": sentence(with_article(story.friend)),
        "they": they, "They": sentence(they), "them": them, "their": their, "Their": sentence(their),
    }  # fmt: skip
    steps = (_OPENINGS, *_PLOTS[story.plot])
    return " ".join(one_of(rng, *step).format_map(words) for step in steps)


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return a request for a story and the story."""
    story = random_story(rng)
    if rng.random() < 0.15:
        story = replace(story, hero=one_of(rng, *_RARE_HEROES) if rng.random() < 0.7 else invented_word(rng).lower())
    kind = one_of(rng, "story", "story", "story", "short story", "little story", "bedtime story", "tale",
                  "nice story", "long story",
                  "funny story", "story for children", "new story")  # fmt: skip
    verb = one_of(rng, "tell me", "tell me", "tell me", "write", "write me", "give me", "tell", "make up")
    form = rng.random()
    if form < 0.2:
        about = ""
    elif form < 0.5:
        plural = story.hero in _PLURAL_IN_S and rng.random() < 0.15
        about = f" about {story.hero}s" if plural else f" about {with_article(story.hero)}"
    elif form < 0.62:
        named = one_of(rng, "named", "called", "whose name is")
        about = f" about {with_article(story.hero)} {named} {story.name}"
    elif form < 0.72:
        about = f" about {with_article(story.hero)} {story.place}"
    elif form < 0.84:
        about = f" about {with_article(story.hero)} and {with_article(story.thing)}"
        story = _with_plot(story, "boat" if story.thing == "boat" else one_of(rng, "lost", "dark"))
    else:
        topic = one_of(rng, *_TOPIC_PLOTS)
        about = f" about {topic}"
        story = _with_plot(story, _TOPIC_PLOTS[topic])
    command = f"{verb} {with_article(kind)}{about}"
    if form >= 0.2 and rng.random() < 0.15:
        command = one_of(rng, f"a story{about}", f"story{about}", f"i want to hear a story{about}", f"a tale{about}")
    return request(rng, command), tell(rng, story)


def exchange_about_something(rng: random.Random) -> tuple[str, str]:
    """Return a request for a story about a topic, or a hero with a name or a thing, and that story."""
    story = random_story(rng)
    form = rng.randrange(4)
    if form == 0:
        name = sentence(invented_word(rng).lower()) if rng.random() < 0.6 else story.name
        story = replace(story, name=name)
        about = f"{with_article(story.hero)} {one_of(rng, 'named', 'called')} {name}"
    elif form == 1:
        thing = story.thing if rng.random() < 0.5 else "boat"
        story = replace(story, thing=thing, plot="boat" if thing == "boat" else one_of(rng, "lost", "dark"))
        about = f"{with_article(story.hero)} and {with_article(thing)}"
    else:
        topic = one_of(rng, *_TOPIC_PLOTS)
        story = _with_plot(story, _TOPIC_PLOTS[topic])
        about = topic
    verb = one_of(rng, "tell me", "tell me", "write", "write me", "give me")
    return request(rng, f"{verb} {one_of(rng, 'a story', 'a story', 'a short story')} about {about}"), tell(rng, story)


def another(rng: random.Random) -> tuple[str, str]:
    """Return a request for one more story and that story."""
    asked = one_of(
        rng,
        "Another one!",
        "Tell me another one.",
        "One more story",
        "Another story please",
        "one more",
        "again",
    )
    return asked, tell(rng, random_story(rng))


def story_with_question(rng: random.Random) -> list[tuple[str, str]]:
    """Return a story and a question about it."""
    story = random_story(rng)
    asked = f"tell me a story about {with_article(story.hero)}"
    told = request(rng, asked), tell(rng, story)
    kind = rng.random()
    if kind < 0.3:
        question = one_of(
            rng,
            "Go on",
            "continue",
            "And then?",
            "what happened then?",
            "what happens next?",
            "more",
            "is that all?",
        )
        return [told, (question, "That was the whole story. Shall I tell you another one?"), _accepted(rng)]
    if kind < 0.65:
        question = one_of(rng, f"What was the name of the {story.hero}?",
                          f"What was the {story.hero} called?",
                          f"what is the name of the {story.hero}")  # fmt: skip
        return [told, (question, f"The {story.hero} was named {story.name}.")]
    question = one_of(rng, f"Who was {story.friend_name}?", f"Who is {story.friend_name}?")
    return [
        told,
        (question, f"{story.friend_name} was {with_article(story.friend)}, a friend of {story.name}."),
    ]


def offered(rng: random.Random) -> list[tuple[str, str]]:
    """Return a sad remark, the offer of a story, and the story."""
    remark = one_of(
        rng,
        "I am sad.",
        "I am bored",
        "I had a bad day",
        "I feel bad",
        "I am tired",
        "i'm bored",
        "i am lonely",
    )
    return [(remark, "I am sorry to hear that. Shall I tell you a short story?"), _accepted(rng)]


def _accepted(rng: random.Random) -> tuple[str, str]:
    accepted = one_of(
        rng,
        "Yes",
        "yes please",
        "Yes, please!",
        "ok",
        "sure",
        "Yeah",
        "please do",
        "yes, tell me a story",
        "go ahead",
    )
    return accepted, tell(rng, random_story(rng))


def _with_plot(story: Story, plot: str) -> Story:
    return replace(story, plot=plot)


_POEM_THINGS = (
    "the sea", "the moon", "the rain", "the wind", "the snow", "a cat", "a dog", "a tree", "the sun",
    "spring", "autumn", "winter", "summer", "love", "a friend", "a bird", "the night", "a river", "the stars",
    "a train", "a robot", "home", "a flower", "a computer", "music", "the morning", "a relay race", "time",
    "life", "a fox",
)  # fmt: skip
_COUPLETS = (
    "It stays with me the whole day long,\nand hums a soft and gentle song.",
    "I look at it and then I smile,\nand we are quiet for a while.",
    "The clouds go by, the day is new,\nthe sky above is wide and blue.",
    "It asks for nothing, gives me light,\nand keeps me company at night.",
    "The road is long, the hill is steep,\nbut dreams are sweet for those who sleep.",
    "And when the evening bells have rung,\nthe world feels warm, the world feels young.",
)


def poem(rng: random.Random) -> tuple[str, str]:
    """Return a request for a poem and four rhyming lines."""
    thing = one_of(rng, *_POEM_THINGS)
    verb = one_of(rng, "write", "write me", "tell me", "give me", "make")
    kind = one_of(rng, "a poem", "a short poem", "a rhyme", "a little poem", "a haiku", "a song", "a verse")
    about = one_of(rng, "", f" about {thing}", f" about {thing}", f" on {thing}")
    couplet = one_of(rng, *_COUPLETS)
    opening = f"I sing a song of {thing},\n" if about else "I sing a song of wind and sea,\n"
    closing = "a thing that means so much to me.\n"
    return request(rng, f"{verb} {kind}{about}"), f"{opening}{closing}{couplet}"
