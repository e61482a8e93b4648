"""Word banks of the demo model's synthetic language.

Every value (name, city, product and so on) is one English word, so the tokenizer can give each word
a separate token. The sentences of reviews and of remarks are here too; the sentences of a review
decide the review's topic and sentiment.
"""

from __future__ import annotations


def _bank(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST = _bank(
    """Alice Bruno Carla David Elena Felix Greta Henry Irene Jonas Karin Louis Maria Nadia Oscar
    Paula Quinn Roger Tomas Ursula Victor Wanda Xavier Yusuf Zelda Anton Berta Clara Diego Emma
    Fiona Gavin Hanna Ivan Julia Kevin Laura Marco Nina Omar Petra Ralph Sarah Theo Vera Walter
    Yara Akira Boris Chloe Dante Edith Frank Gloria Hugo Ingrid Jacob Kiran Leila Miles Noah
    Olga Pedro Rosa Simon Tina Uma Vito Wendy Amir Bella Cyrus Dora Eric Farah"""
)
LAST = _bank(
    """Adams Baker Costa Duran Evans Fuchs Grant Haas Ibsen Klein Lopez Meyer Novak Olsen Patel
    Rossi Silva Tanaka Urban Vogel Weber Young Zhang Brown Clark Dubois Ferrer Garcia Huang
    Jensen Keller Larsen Moreau Nagy Ortiz Perez Reyes Sato Torres Walsh"""
)
CITY = _bank(
    """Oslo Lima Paris Rome Cairo Delhi Tokyo Seoul Quito Berlin Madrid Lisbon Vienna Prague Dublin
    Athens Warsaw Kyiv Riga Tallinn Bern Zurich Geneva Milan Turin Porto Seville Lyon Nice Ghent
    Bergen Malmo Turku Gdansk Brno Split Sofia Izmir Haifa Amman Doha Dubai Muscat Lagos Accra
    Dakar Tunis Rabat Nairobi Kampala Lusaka Harare Boston Austin Denver Dallas Miami Seattle
    Toronto Ottawa Calgary Havana Bogota Cusco Santiago Manila Hanoi Taipei Osaka Kyoto Sydney
    Perth"""
)
JOB = _bank(
    """pilot nurse baker lawyer teacher painter farmer doctor singer plumber writer dentist chef
    actor tailor sailor miner judge coach librarian barber jeweler florist surgeon waiter guard
    translator printer welder butcher"""
)
PLAN = _bank("basic silver gold premium family student")
CATEGORIES: dict[str, tuple[str, ...]] = {
    "kitchen": _bank("kettle mixer toaster blender oven grill"),
    "office": _bank("keyboard monitor scanner desk stapler whiteboard"),
    "garden": _bank("hose mower shovel rake fountain hammock"),
    "sport": _bank("bicycle racket tent treadmill skateboard helmet"),
    "music": _bank("guitar piano violin trumpet drum flute"),
    "home": _bank("lamp sofa heater mirror carpet pillow"),
}
PRODUCT = tuple(item for items in CATEGORIES.values() for item in items)
CATEGORY_OF = {item: kind for kind, items in CATEGORIES.items() for item in items}
PET = _bank("""cat dog parrot rabbit turtle horse goat ferret lizard snake canary duck pony""")
COLOR = _bank("""red blue green yellow black white purple orange pink brown gray teal""")
DRINK = _bank("tea coffee milk cider cocoa lemonade water juice soda mead")
MONTH = _bank("""January March April June July August October November December""")
DAY = _bank("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SYLLABLES = _bank(
    """ba be bi bo da de di do fa fe ka ke ki ko la le li lo ma me mi mo na ne ni no ra re ri ro sa
    se ta te ti to va ve vi za zo"""
)

GOOD = _bank(
    """great wonderful excellent fantastic lovely superb brilliant perfect amazing beautiful
    reliable good"""
)
BAD = _bank(
    """terrible awful horrible useless dreadful broken poor ugly disappointing flimsy faulty bad"""
)

SENTIMENTS = ("positive", "negative")
TOPICS = ("delivery", "price", "quality", "support")
PHRASES: dict[tuple[str, str], tuple[str, ...]] = {
    ("delivery", "positive"): (
        "The parcel arrived a day early.",
        "Delivery was quick and on time.",
        "It came faster than promised.",
        "The courier was kind and careful with the box.",
        "Shipping took only one day.",
        "The package reached me in perfect shape.",
        "The delivery was excellent.",
    ),
    ("delivery", "negative"): (
        "The parcel arrived two weeks late.",
        "Delivery was slow and nobody told me why.",
        "The courier left the box in the rain.",
        "The package was lost for ten days.",
        "Shipping took a whole month.",
        "The box came crushed and open.",
        "The delivery was terrible.",
    ),
    ("price", "positive"): (
        "The price is very fair.",
        "It is worth every cent.",
        "It is great value for the money.",
        "I paid far less than I expected.",
        "It was cheaper than in any other shop.",
        "For this price you cannot go wrong.",
        "The price is excellent.",
    ),
    ("price", "negative"): (
        "It is far too expensive.",
        "It is a waste of money.",
        "The price went up after I ordered.",
        "I paid twice what my friend paid.",
        "It costs much more than it should.",
        "For this price I expected far more.",
        "The price is terrible.",
    ),
    ("quality", "positive"): (
        "The {item} works great.",
        "It feels solid and well made.",
        "It is easy to use and looks beautiful.",
        "It never lets me down.",
        "It is the best {item} I have owned.",
        "It still runs like new.",
        "The {item} is {good}.",
        "It is a {good} {item}.",
    ),
    ("quality", "negative"): (
        "The {item} broke after a week.",
        "It feels cheap and badly made.",
        "It is hard to use and looks ugly.",
        "It keeps failing.",
        "It is the worst {item} I have owned.",
        "It stopped working on the second day.",
        "The {item} is {bad}.",
        "It is a {bad} {item}.",
    ),
    ("support", "positive"): (
        "The support team answered at once.",
        "The agent solved my problem in minutes.",
        "Their help line was friendly and helpful.",
        "They replaced a missing part without any fuss.",
        "The person on the phone was very patient.",
        "Customer service called me back the same hour.",
        "Their support is excellent.",
    ),
    ("support", "negative"): (
        "The support team never answered.",
        "The agent was rude and hung up on me.",
        "Their help line did not help at all.",
        "They ignored all of my emails.",
        "The person on the phone was very impatient.",
        "Customer service kept me waiting for two hours.",
        "Their support is terrible.",
    ),
}
GENERAL: dict[str, tuple[str, ...]] = {
    "positive": (
        "I am very happy.",
        "I would buy it again.",
        "I recommend it to everyone.",
        "I love it.",
        "My family is delighted.",
        "Thank you for this.",
    ),
    "negative": (
        "I am very unhappy.",
        "I would not buy it again.",
        "I cannot recommend it to anyone.",
        "I hate it.",
        "My family is annoyed.",
        "I want my money back.",
    ),
}
NEUTRAL = (
    "I bought it in {month}.",
    "I ordered it on a {day}.",
    "My cousin has one too.",
    "The manual is short.",
    "It came in a brown box.",
    "I use it twice a week.",
    "I picked the gray one.",
    "It stands next to the window.",
)
FILLER = (
    "The call came in on {day} at about {hour} in the morning and was taken by the first agent.",
    "The agent checked the account, found no open bills and closed the ticket.",
    "A copy of the invoice was sent by mail in {month}.",
    "No other orders are open at the moment.",
    "The account has been with us since {month} of last year.",
    "The agent thanked the customer for the call and wrote this note.",
    "The next call is planned for {day}.",
    "We sent the usual form and a short list of questions.",
    "The warranty runs for {hour} more months.",
    "This note was checked by a second agent on {day}.",
)
