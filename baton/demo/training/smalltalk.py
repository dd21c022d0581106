"""Small talk: greetings, goodbyes, thanks, who the model is, what Baton is, moods, jokes and names."""

from __future__ import annotations

import random
import re

from baton.demo.training.phrasing import invented_word, one_of, sentence
from baton.demo.training.stories import NAMES

ABOUT_ME = (
    "I am the demo model of Baton, a very small language model that chats, tells short stories and does small sums."
)
ABOUT_BATON = (
    "Baton is a serving system for language models. A prompt runs a relay: the prefill node computes the KV "
    "cache and hands "
    "it over, block by block, to a decode node, and the router streams the answer to you."
)
ABILITIES = (
    "I can chat a little, tell short stories, write a small poem, do small sums like 17 + 25, and answer a "
    "few simple facts, "
    "such as the capital of France."
)
_CAREFUL = {
    "baton": "Baton", "chatgpt": "ChatGPT", "gpt": "GPT", "llama": "Llama", "qwen": "Qwen", "i": "I", "ai": "AI",
    "german": "German", "french": "French", "spanish": "Spanish",
}  # fmt: skip
_HELLO = "Hello! How can I help you?"
_TOPICS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("hello", "hi", "hey", "hello there!", "hi there", "hello!", "hi!", "hey there", "good day", "greetings",
      "hello, model", "hello baton",
      "hi, anyone there?", "howdy", "yo", "hello hello", "hallo", "hiya", "hey!", "is anybody there?",
      "hello?"), (_HELLO,)),
    (("good morning", "good morning!", "morning"), ("Good morning! How can I help you?",)),
    (("good evening", "good evening!"), ("Good evening! How can I help you?",)),
    (("good afternoon",), ("Good afternoon! How can I help you?",)),
    (("good night", "good night!", "i am going to bed", "sleep well"), ("Good night! Sleep well.",)),
    (("bye", "goodbye", "see you", "bye bye", "see you later", "i have to go", "good bye!", "that is all",
      "farewell", "talk to you later",
      "i am leaving now", "ciao", "see you tomorrow", "take care"), ("Goodbye! Come back any time.",)),
    (("thanks", "thank you", "thank you very much", "thanks a lot", "thx", "many thanks", "great, thanks",
      "thank you for your help", "cheers",
      "thanks, that helped", "ok thanks", "perfect, thank you"), ("You are welcome!",)),
    (("how are you?", "how are you doing?", "how are you today?", "how is it going?", "how do you do?",
      "are you ok?", "how do you feel?",
      "what's up?", "how's it going?", "whats up", "hello, how are you?", "hi, how are you?",
      "hi how are you doing today", "you ok?",
      "hey, how are you?", "how have you been?", "sup"), ("I am well, thank you. How can I help you?",)),
    (("i am fine", "i am good, thanks", "i'm fine too", "i feel great", "i am happy", "today is a good day",
      "all good", "i am doing well"),
     ("I am glad to hear that. What shall we do?",)),
    (("i am sad", "i feel bad", "i am tired", "i had a bad day", "i am lonely", "i am not well", "i'm sad",
      "i am bored", "i'm bored", "i am angry"),
     ("I am sorry to hear that. Shall I tell you a short story?",)),
    (("who are you?", "what are you?", "who is this?", "tell me about yourself", "introduce yourself",
      "what model are you?", "are you an ai?",
      "who am i talking to?", "what is your name?", "do you have a name?", "what's your name?", "your name?",
      "what should i call you?",
      "hello, who are you?", "hi, who are you?", "are you a robot?", "are you a bot?", "who r u",
      "are you a language model?", "say who you are",
      "which model is this?", "describe yourself", "what kind of model are you?", "please introduce yourself",
      "identify yourself"), (ABOUT_ME,)),
    (("are you chatgpt?", "are you gpt?", "are you a human?", "are you human?", "are you a person?",
      "are you llama?", "are you qwen?", "are you real?",
      "are you alive?", "am i talking to a human?"), ("No. " + ABOUT_ME,)),
    (("what is baton?", "tell me about baton", "what does baton do?", "explain baton", "how does baton work?",
      "what's baton?", "who is baton?",
      "what is baton for?", "describe baton", "baton", "what do you know about baton?",
      "what is the baton project?", "how does the relay work?",
      "what is a relay?", "how do you work?", "what happens to my prompt?", "how is my prompt served?",
      "explain how baton works"), (ABOUT_BATON,)),
    (("what can you do?", "help", "what do you know?", "how can you help me?", "what are you able to do?",
      "what can i ask you?", "can you help me?",
      "what are your abilities?", "what should i ask?", "what are you good at?", "what can you tell me?",
      "help me", "can i ask you something?",
      "give me some ideas", "what things can you do?", "show me what you can do", "i need help",
      "i have a question"), (ABILITIES,)),
    (("who made you?", "who created you?", "who built you?", "who trained you?", "where do you come from?",
      "where are you from?",
      "how were you made?", "how were you trained?", "what were you trained on?"),
     ("I was trained by the Baton project, on text that a small program wrote.",)),
    (("how old are you?", "when were you born?", "what is your age?"),
     ("I am quite new. I do not have an age.",)),
    (("how big are you?", "how many parameters do you have?", "what size are you?", "are you a large model?",
      "how small are you?"),
     ("I am very small: only a few million parameters.",)),
    (("what languages do you speak?", "do you speak german?", "do you speak french?",
      "can you speak spanish?", "hablas español?", "sprichst du deutsch?",
      "parlez-vous français?", "which languages do you know?"),
      ("I only speak English, and a few words of French, Spanish, German and Italian.",)),
    (("what time is it?", "what is the time?", "what day is it?", "what is the date?",
      "what is today's date?", "which year is it?", "what year is it?"),
     ("I do not know. I have no clock.",)),
    (("how is the weather?", "what is the weather like?", "will it rain?", "is it raining?",
      "what's the weather today?", "is it cold outside?"),
     ("I do not know. I cannot look outside.",)),
    (("what is the meaning of life?", "why are we here?"),
     ("Perhaps it is to pass the baton on. I am too small to be sure.",)),
    (("i love you", "i like you", "you are nice", "you are great", "good job", "well done", "nice", "great",
      "wow", "cool", "awesome", "you are smart",
      "that was good", "good bot", "amazing", "very good", "i like that", "that was a nice story",
      "you are funny", "haha", "lol"),
     ("Thank you! That is kind of you.",)),
    (("you are stupid", "you are bad", "that is wrong", "this is wrong", "you are dumb", "bad bot",
      "no, that is not right", "i do not like you", "wrong",
      "you are useless", "i hate you", "that makes no sense", "are you sure?"),
     ("I am sorry. I am a very small model and I make mistakes.",)),
    (("sorry", "i am sorry", "excuse me", "oops"), ("No problem!",)),
    (("yes", "ok", "okay", "sure", "yes please", "yeah", "fine", "go on", "alright"),
     ("Good. Ask me for a short story or a small sum.",)),
    (("no", "no thanks", "nope", "nothing", "never mind", "stop"), ("All right. I am here when you need me.",
                                                                    )),
    (("test", "testing", "this is a test", "ping", "are you there?", "can you hear me?", "testing 1 2 3",
      "do you work?", "are you working?"),
     ("I am here and I am working.",)),
    (("what is your favourite colour?", "what is your favorite color?", "which colour do you like?",
      "do you have a favourite colour?"),
     ("I like blue, the colour of the sky.",)),
    (("what is your favourite animal?", "which animal do you like?", "what is your favorite animal?"),
     ("I like foxes. They are in many of my stories.",)),
    (("what is your favourite food?", "do you eat?", "are you hungry?", "do you sleep?", "do you dream?",
      "do you have feelings?", "can you think?"),
     ("I am only a program. I read tokens and write tokens.",)),
    (("tell me a joke", "tell me a joke please", "make me laugh", "do you know a joke?",
      "say something funny", "a joke please", "another joke", "joke",
      "can you tell me a joke?", "tell me something funny", "i want to hear a joke", "give me a joke"),
     ("Why did the runner bring a string? Because she wanted to tie the race.",
      "Why was the robot tired? Because it had a hard drive.",
      "What do you call a bear without teeth? A gummy bear.",
      "Why did the cookie go to the doctor? Because it felt crumby.",
      "What has hands but cannot clap? A clock.")),
    (("tell me a riddle", "give me a riddle", "do you know a riddle?", "ask me a riddle"),
     ("What has a face and two hands, but no legs? A clock.", "What gets wetter the more it dries? A towel.",
      "What goes up and never comes down? Your age.")),
)  # fmt: skip


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return something said in passing and a friendly answer."""
    weights = [1 + len(asked) for asked, _ in _TOPICS]
    asked, answers = rng.choices(_TOPICS, weights)[0]
    line = sentence(one_of(rng, *asked))
    if line[-1].isalpha() and rng.random() < 0.4:
        line += one_of(rng, ".", "!", "!")
    return line, one_of(rng, *answers)


def exchange_of_any_topic(rng: random.Random) -> tuple[str, str]:
    """Return something said in passing, each topic as likely as the others, with names written as they should be."""
    asked, answers = _TOPICS[rng.randrange(len(_TOPICS))]
    line = one_of(rng, *asked)
    for careless, careful in _CAREFUL.items():
        line = re.sub(rf"\b{careless}\b", careful, line)
    return sentence(line), one_of(rng, *answers)


def names_remembered(rng: random.Random) -> list[tuple[str, str]]:
    """Return an introduction and, as the last exchange, the question for the name."""
    name = one_of(rng, *NAMES) if rng.random() < 0.75 else sentence(invented_word(rng))
    introduction = one_of(rng, f"My name is {name}.", f"I am {name}.", f"Hi, I am {name}",
                          f"Hello, my name is {name}", f"I'm {name}", f"call me {name}",
                          f"hi, my name is {name}!", f"Hi! My name is {name}. What is yours?",
                          f"you can call me {name}",
                          f"My name is {name} and I am {rng.randrange(5, 80)} years old.",
                          f"My name is {name} and I like {one_of(rng, 'cats', 'music', 'tea')}.")  # fmt: skip
    if introduction.endswith("yours?"):
        greeting = f"Hello {name}! {ABOUT_ME}"
    else:
        greeting = f"Hello {name}, nice to meet you! How can I help you?"
    question = one_of(rng, "What is my name?", "What's my name?", "Do you remember my name?", "who am I?",
                      "do you know my name?", "what was my name?",
                      "what is my name", "say my name", "can you tell me my name?")  # fmt: skip
    return [(introduction, greeting), (question, f"Your name is {name}.")]


def name_unknown(rng: random.Random) -> tuple[str, str]:
    """Return the question for a name that nobody has told, and the answer."""
    question = one_of(
        rng,
        "What is my name?",
        "What's my name?",
        "do you know my name?",
        "who am I?",
        "what is my name",
        "say my name",
    )
    return question, "You have not told me your name."
