"""Phrasings of facts and of questions in the demo model's synthetic language.

There are several variants per kind, because users will not ask in exactly the words of a single
template. In the templates `{w}` is the question's reference to the customer, `{r}` its reference to
the review, and `{v}` a value.
"""

from __future__ import annotations

FIELDS = ("city", "job", "product", "order", "plan")
LINKED_FIELDS = ("born", "pet", "color", "drink")
LABELS: dict[str, tuple[str, ...]] = {
    "city": ("City",),
    "job": ("Job",),
    "product": ("Product", "Item"),
    "order": ("Order", "Order number"),
    "plan": ("Plan",),
}
SAY: dict[str, tuple[str, ...]] = {
    "city": ("{s} lives in {v}.", "{s} has a home in {v}.", "{s} writes to us from {v}."),
    "job": ("{s} works as a {v}.", "{s} is a {v}.", "{s} earns a living as a {v}."),
    "product": ("{s} bought a {v}.", "{s} ordered a {v}.", "{s} owns a {v}."),
    "order": (
        "{s} has order number {v}.",
        "The order number is {v}.",
        "{s} wrote about order {v}.",
    ),
    "plan": ("{s} is on the {v} plan.", "{s} pays for the {v} plan.", "{s} chose the {v} plan."),
    "born": ("{s} was born in {v}.", "{s} grew up in {v}."),
    "pet": ("{s} keeps a {v}.", "{s} has a pet {v}."),
    "color": ("{s} likes the color {v}.", "The favorite color is {v}."),
    "drink": ("{s} drinks {v}.", "{s} always orders {v}."),
}
ASK: dict[str, tuple[str, ...]] = {
    "name": (
        "What is the name of the customer?",
        "Who is the customer?",
        "What is the customer called?",
        "Which customer is this note about?",
        "What is the customer's name?",
        "Who wrote the review?",
    ),
    "city": (
        "Where does {w} live?",
        "In which city does {w} live?",
        "Which city does {w} live in?",
        "What is the city of {w}?",
        "Which city is {w} from?",
        "What is {w}'s city?",
    ),
    "job": (
        "What is the job of {w}?",
        "What does {w} do for a living?",
        "What is {w}'s job?",
        "Which job does {w} have?",
        "What is the profession of {w}?",
        "What does {w} work as?",
    ),
    "product": (
        "What did {w} buy?",
        "Which product did {w} buy?",
        "What product did {w} order?",
        "Which product does {w} have?",
        "What is {w}'s product?",
        "Which item did {w} buy?",
    ),
    "order": (
        "What is the order number of {w}?",
        "Which order number does {w} have?",
        "What is {w}'s order number?",
        "What is the order number for {w}?",
        "Which order does {w} have?",
    ),
    "plan": (
        "Which plan is {w} on?",
        "What is the plan of {w}?",
        "What plan does {w} have?",
        "Which plan did {w} choose?",
        "What is {w}'s plan?",
        "Which plan does {w} pay for?",
    ),
    "born": (
        "Where was {w} born?",
        "In which city was {w} born?",
        "What is the birthplace of {w}?",
        "Where did {w} grow up?",
    ),
    "pet": (
        "Which pet does {w} have?",
        "What pet does {w} keep?",
        "What is the pet of {w}?",
        "Which animal does {w} keep?",
    ),
    "color": (
        "Which color does {w} like?",
        "What is the favorite color of {w}?",
        "What color does {w} like?",
        "What is {w}'s favorite color?",
    ),
    "drink": (
        "What does {w} drink?",
        "Which drink does {w} order?",
        "What is the drink of {w}?",
        "What does {w} like to drink?",
    ),
    "sentiment": (
        "What is the sentiment of {r}?",
        "Classify the sentiment of {r}.",
        "Is {r} positive or negative?",
        "Classify {r} as positive or negative.",
        "Label the sentiment of {r} as positive or negative.",
        "Sentiment of {r}?",
    ),
    "topic": (
        "What is {r} about?",
        "What is the topic of {r}?",
        "Classify the topic of {r}.",
        "Is {r} about delivery, price, quality or support?",
        "Which topic does {r} cover: delivery, price, quality or support?",
        "Topic of {r}?",
    ),
    "category": (
        "What is the product category of {w}?",
        "Which category does the product of {w} belong to?",
        "Which kind of product did {w} buy?",
        "What kind of product does {w} have?",
        "Category of the product of {w}?",
    ),
}
EXTRACT = (
    "Extract the {f}.",
    "Extract the {f} from the note.",
    "Return only the {f}.",
    "Give me the {f}.",
    "What is the {f}?",
    "{F}?",
    "Which {f} does the note mention?",
)
EXTRACT_NAMES: dict[str, tuple[str, ...]] = {
    "name": ("name", "customer name", "customer"),
    "city": ("city",),
    "job": ("job", "profession"),
    "product": ("product", "item"),
    "order": ("order number", "order"),
    "plan": ("plan",),
    "sentiment": ("sentiment",),
    "topic": ("topic",),
    "category": ("category", "product category"),
}
CHECK: dict[str, tuple[str, ...]] = {
    "city": (
        "Does {w} live in {v}?",
        "Is {w} from {v}?",
        "Is {v} the city of {w}?",
        "Is {w}'s city {v}?",
        "Is the home of {w} in {v}?",
    ),
    "job": (
        "Is {w} a {v}?",
        "Does {w} work as a {v}?",
        "Is {v} the job of {w}?",
        "Is {w}'s job {v}?",
    ),
    "product": (
        "Did {w} buy a {v}?",
        "Did {w} order a {v}?",
        "Does {w} own a {v}?",
        "Is {v} the product of {w}?",
        "Does {w} have a {v}?",
    ),
    "plan": (
        "Is {w} on the {v} plan?",
        "Does {w} have the {v} plan?",
        "Did {w} choose the {v} plan?",
        "Is {v} the plan of {w}?",
    ),
    "topic": (
        "Is {r} about {v}?",
        "Does {r} talk about {v}?",
        "Is {v} the topic of {r}?",
        "Does {r} mention {v}?",
    ),
    "category": (
        "Did {w} buy a {v} product?",
        "Is the product of {w} a {v} product?",
        "Does {w} have a {v} product?",
        "Is {v} the product category of {w}?",
    ),
    "positive": (
        "Is {r} positive?",
        "Is {r} a positive one?",
        "Is {r} a positive review?",
        "Is {w} happy?",
        "Is {w} satisfied?",
        "Does {w} like the product?",
    ),
    "negative": (
        "Is {r} negative?",
        "Is {r} a negative one?",
        "Is {r} a negative review?",
        "Is {w} unhappy?",
        "Is {r} a complaint?",
        "Does {w} complain?",
    ),
}
POLAR = (
    "positive",
    "negative",
    "happy",
    "unhappy",
    "satisfied",
    "like",
    "complaint",
    "complain",
)
CHECK_HINTS = ("Answer yes or no.", "Reply with yes or no.", "Yes or no?")
ASK_HINTS = ("Answer with one word.", "Answer briefly.", "Return only the answer.")
