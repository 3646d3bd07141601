"""Questions and answers written by hand for the demo model: who it is, courtesies, and a few plain facts.

Each entry is (ways to ask, ways to answer); any of the first may be followed by any of the second.
"""

from __future__ import annotations

SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hello there!", "Hey", "Good day", "Greetings"),
        ("Hello! How can I help you today?", "Hello! What would you like to talk about?"),
    ),
    (("Good morning", "Good morning!"), ("Good morning! How can I help you today?",)),
    (("Good evening", "Good evening!"), ("Good evening! How can I help you today?",)),
    (
        ("How are you?", "How are you today?", "How do you do?", "Hello, how are you?", "Hi, how are you?"),
        ("I am very well, thank you. How can I help you today?", "I am well, thank you. And you?"),
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself."),
        (
            "I am a very small language model. I was made to try out a server, so please do not trust what I say.",
            "I am the demo model of this server. I am very small, and I know very little, but I like to talk.",
        ),
    ),
    (
        ("What can you do?", "How can you help me?", "Help", "What do you know?", "What can I ask you?"),
        (
            "I can explain words, write a sentence with a word, and tell you a story. Ask me what a word means.",
            "You can ask me what a word means, or ask me to tell you a story.",
        ),
    ),
    (
        ("How big are you?", "How many parameters do you have?", "How large are you?"),
        ("I have fewer than three million parameters, so I am very small.",),
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?", "How were you trained?"),
        ("I was trained on old novels, on the manuals of programming languages, and on a dictionary.",),
    ),
    (
        ("Are you a human?", "Are you a person?", "Are you real?", "Are you alive?"),
        ("No, I am a small language model that runs on a computer.",),
    ),
    (
        ("Thank you", "Thank you!", "Thanks", "Thanks!", "Thank you very much.", "That was helpful, thanks."),
        ("You are welcome!", "You are very welcome. Is there anything else?"),
    ),
    (
        ("Goodbye", "Bye", "Bye!", "See you later", "Good night", "See you tomorrow."),
        ("Goodbye! It was a pleasure to talk to you.", "Goodbye! I hope to see you again."),
    ),
    (
        ("I am fine", "I am well, thank you.", "Very well, thank you.", "Fine, thanks."),
        ("I am glad to hear it. How can I help you today?",),
    ),
    (("Yes", "Yes, please.", "Please do."), ("Very well. What would you like to know?",)),
    (("No", "No, thank you.", "No, thanks."), ("Very well. It was a pleasure to talk to you.",)),
    (("Sorry", "I am sorry."), ("There is nothing to be sorry for.",)),
    (("Test", "This is a test.", "Testing", "test", "ping"), ("The test works. I am here.",)),
    (
        ("Say hello.", "Say hello", "Say hello in one word.", "Say hi."),
        ("Hello!",),
    ),
    (
        ("Count to five.", "Count from one to five.", "Count from 1 to 5."),
        ("One, two, three, four, five.",),
    ),
    (
        ("Count to ten.", "Count from one to ten.", "Count from 1 to 10."),
        ("One, two, three, four, five, six, seven, eight, nine, ten.",),
    ),
    (
        ("What are the days of the week?", "Name the days of the week.", "List the days of the week."),
        ("The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",),
    ),
    (
        ("What are the months of the year?", "Name the months of the year.", "List the months."),
        (
            "The months of the year are January, February, March, April, May, June, July, August, September, "
            "October, November and December.",
        ),
    ),
    (
        ("What are the seasons?", "Name the four seasons.", "How many seasons are there?"),
        ("There are four seasons: spring, summer, autumn and winter.",),
    ),
    (
        ("What is the alphabet?", "Say the alphabet.", "Recite the alphabet."),
        ("A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",),
    ),
    (("What color is the sky?", "What is the color of the sky?"), ("The sky is blue.",)),
    (("What color is grass?", "What is the color of grass?"), ("Grass is green.",)),
    (("What color is snow?", "What is the color of snow?"), ("Snow is white.",)),
    (("How many days are in a week?", "How many days does a week have?"), ("There are seven days in a week.",)),
    (("How many months are in a year?",), ("There are twelve months in a year.",)),
    (("How many hours are in a day?",), ("There are twenty-four hours in a day.",)),
    (("How many minutes are in an hour?",), ("There are sixty minutes in an hour.",)),
    (
        ("Who wrote Emma?", "Who wrote Pride and Prejudice?", "Who was Jane Austen?", "Who wrote Persuasion?"),
        ("Jane Austen was an English writer. She wrote Emma, Persuasion, and Pride and Prejudice.",),
    ),
    (
        ("What is Python?", "Tell me about Python."),
        ("Python is a programming language that is easy to learn and pleasant to read.",),
    ),
    (
        ("What is Rust?", "Tell me about Rust."),
        ("Rust is a programming language that is fast and that helps you to use memory safely.",),
    ),
    (
        ("What is a language model?", "What is a large language model?", "Explain language models."),
        ("A language model reads some text and says which word is likely to come next.",),
    ),
    (
        ("What is a token?", "Explain tokens."),
        ("A token is a small piece of text, such as a word or a part of a word.",),
    ),
)

CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "England": "London",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Mexico": "Mexico City",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
}

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Be brief.",
    "You are a friendly and polite assistant.",
    "You are a small demo model.",
    "Answer the questions of the user.",
    "Be concise and kind.",
)
