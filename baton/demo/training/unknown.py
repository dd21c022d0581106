"""Questions from outside the small world of the demo model, and the admission that it does not know.

Questions are built from many templates and topics, among them invented words and random letters, so that
whatever the model has never seen leads to an admission and not to an invention.
"""

from __future__ import annotations

import random

from baton.demo.training import stories
from baton.demo.training.phrasing import invented_word, one_of, sentence

ADMISSION = "I do not know that. I am a very small demo model."
_MORE = (
    " I can chat, tell short stories, do small sums and answer a few simple facts.",
    " Ask me for a short story or a small sum instead.",
    "",
)
_TOPICS = (
    "quantum physics", "the stock market", "carburetors", "tax law", "black holes", "photosynthesis",
    "the French Revolution", "machine learning", "the Roman Empire", "climate change", "DNA",
    "chess openings", "jazz", "inflation", "bitcoin", "the human heart", "volcanoes", "vaccines", "gravity",
    "evolution", "philosophy", "the Cold War", "electric cars", "neural networks", "basketball",
    "world history", "chemistry", "earthquakes", "the periodic table", "democracy", "Shakespeare", "Einstein",
    "Napoleon", "Mozart", "the Olympics", "nuclear power", "relativity", "databases", "Linux", "Kubernetes",
    "Python", "JavaScript", "Docker", "the internet", "rockets", "Mars", "sleep", "diabetes", "yoga",
    "economics", "the pyramids", "the Renaissance", "poker", "football", "wine", "coffee", "sourdough",
    "mortgages", "solar panels", "antibiotics", "the brain", "superconductors", "compilers", "recursion",
    "blockchain", "marketing", "psychology", "the Big Bang", "string theory", "World War II", "Julius Caesar",
    "Marie Curie", "the Moon landing", "transformers", "attention", "GPUs", "CUDA", "RDMA", "TCP", "HTTP",
    "SQL", "Rust", "C++", "Java", "algebra", "calculus",
)  # fmt: skip
_PEOPLE = (
    "the president of the United States", "the king of England", "Albert Einstein", "the CEO of Google",
    "Beyonce", "the prime minister of Canada", "Taylor Swift", "Leonardo da Vinci", "the author of Hamlet",
    "Elon Musk", "Plato", "the first man on the moon", "the inventor of the telephone", "Cleopatra",
    "Isaac Newton", "the pope", "Messi", "the fastest man in the world", "the richest person",
    "Michael Jordan", "Harry Potter", "Batman", "Steve Jobs",
)  # fmt: skip
_TASKS = (
    "fix a flat tyre", "bake a cake", "learn the piano", "write a resume", "lose weight", "build a website",
    "cook rice", "invest money", "change a light bulb", "train a dog", "grow tomatoes", "install Linux",
    "repair a phone", "tie a tie", "make pasta", "get a visa", "buy a house", "fly a plane",
    "solve a Rubik's cube", "sort a list", "write a test", "remove a stain", "make coffee", "find a job",
    "plan a wedding", "knit a sweater", "paint a wall", "start a company", "deploy a server",
    "reverse a string", "parse JSON", "center a div", "use git", "speed up my computer", "stop smoking",
)  # fmt: skip
_WRITING = (
    "an essay", "an email to my boss", "a Python function", "a program", "a cover letter", "a business plan",
    "a news article", "a recipe for lasagna", "a speech", "a SQL query", "a shell script",
    "a sorting algorithm", "a report", "a regular expression", "a web server in Go", "a blog post", "a tweet",
    "a product description", "a unit test", "a summary of War and Peace",
)  # fmt: skip
_PLACES = (
    "Boston", "New York", "Naples", "Mumbai", "the Sahara", "Antarctica", "Texas", "Siberia", "Mount Everest",
    "the Amazon", "California", "Atlantis", "Hollywood", "the Pacific Ocean", "Shanghai", "Sydney", "Chicago",
    "Lake Victoria",
)  # fmt: skip
_WORKS = ("book", "movie", "song", "game", "restaurant")
_DEEDS = ("eat", "wear", "read", "buy", "do", "watch")
_WHYS = ("cats purr", "we dream", "leaves fall", "people lie", "stars shine", "ships float", "planes fly")


def question(rng: random.Random) -> str:
    """Return a question the model cannot answer."""
    topic = one_of(rng, *_TOPICS) if rng.random() < 0.65 else invented_word(rng)
    person = (
        one_of(rng, *_PEOPLE)
        if rng.random() < 0.7
        else f"{sentence(invented_word(rng))} {sentence(invented_word(rng))}"
    )
    task, text, place = one_of(rng, *_TASKS), one_of(rng, *_WRITING), one_of(rng, *_PLACES)
    year = rng.randrange(1000, 2030)
    word = one_of(rng, "strawberry", "banana", "hello", invented_word(rng))
    return sentence(
        one_of(
            rng, f"what is {topic}?", f"explain {topic}", f"explain {topic} to me", f"how does {topic} work?",
            f"what does {topic} mean?", f"tell me about {topic}", f"what do you know about {topic}?",
            f"why is {topic} important?", f"who invented {topic}?", f"what are {topic}?", f"define {topic}",
            f"can you explain {topic}?", f"give me an overview of {topic}",
            f"what is the history of {topic}?", f"is {topic} dangerous?",
            f"what is the difference between {topic} and {invented_word(rng)}?", f"who is {person}?",
            f"who was {person}?", f"how old is {person}?", f"when was {person} born?",
            f"tell me about {person}", f"where does {person} live?", f"how do I {task}?", f"how to {task}",
            f"how can I {task}?", f"teach me to {task}", f"help me {task}",
            f"what is the best way to {task}?", f"write {text}", f"write {text} about {topic}",
            f"write me {text}", f"how far is {place}?", f"how many people live in {place}?",
            f"where is {place}?", f"how big is {place}?", f"how high is {place}?",
            f"what happened in {year}?", f"who won the world cup in {year}?",
            f"what happened in {place} in {year}?", f"what is the price of {topic}?",
            f"recommend a {one_of(rng, *_WORKS)} {one_of(rng, 'to me', f'about {topic}', f'in {place}')}",
            f"{topic}", f"{invented_word(rng)} {invented_word(rng)} {invented_word(rng)}",
            f"what is a {invented_word(rng)}?",
            f"summarize {one_of(rng, 'this text', 'the news', f'the book {sentence(invented_word(rng))}', topic)}",
            f"why do {one_of(rng, *_WHYS)}?", f"what is the population of {place}?",
            f"what should I {one_of(rng, *_DEEDS)} {one_of(rng, 'today', 'tonight', 'tomorrow')}?",
            f"what does {invented_word(rng)} mean in {one_of(rng, 'Latin', 'Greek', 'Chinese', 'English')}?",
            f"when did {topic} start?", f"how do you pronounce {invented_word(rng)}?",
            f"what is the best {one_of(rng, 'phone', 'car', 'laptop', 'city', 'football team', 'language')}?",
            f"how many letters are in {word}?", f"how many {rng.choice('aeiourst')}s are in {word}?",
            f"who wrote {sentence(invented_word(rng))}?", f"what is the chemical formula of {topic}?",
            f"compare {topic} and {one_of(rng, *_TOPICS)}",
        )
    )  # fmt: skip


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return a question from outside the small world and the admission."""
    asked = _pasted(rng) if rng.random() < 0.06 else question(rng)
    return asked, ADMISSION + one_of(rng, *_MORE)


def _pasted(rng: random.Random) -> str:
    words = [rng.choice(_TOPICS) if rng.random() < 0.5 else invented_word(rng) for _ in range(rng.randrange(10, 40))]
    text = " ".join(words) if rng.random() < 0.5 else stories.tell(rng, stories.random_story(rng))
    task = one_of(
        rng,
        "Summarize this text",
        "Translate this to German",
        "Rewrite this",
        "Correct this",
        "Summarise",
        "Shorten this",
    )
    return one_of(rng, f"{task}: {text}", f"{text}\n\n{task}.", text if text[0].islower() else f"{task}:\n{text}")
