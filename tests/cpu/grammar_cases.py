"""Functions with questions, and everyday schemas, for `grammar_figures`. A field is written `name:type`, with `!` where
it is required; a type is string, integer, number, boolean, a format, `a|b` for listed values, `[type]` for a list."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from quire.text.channels import FORMATS, ToolSpec, tool_grammar
from quire.types import GrammarSpec

_TYPES = ("string", "integer", "number", "boolean")


def object_of(fields: str) -> dict[str, Any]:
    properties, required = {}, []
    for field in fields.split():
        name, _, kind = field.partition(":")
        if kind.endswith("!"):
            required.append(name)
        properties[name] = _type_of(kind.removesuffix("!"))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _type_of(kind: str) -> dict[str, Any]:
    if kind.startswith("["):
        return {"type": "array", "items": _type_of(kind[1:-1]), "maxItems": 4}
    if "|" in kind:
        return {"type": "string", "enum": kind.split("|")}
    return {"type": kind} if kind in _TYPES else {"type": "string", "format": kind}


@dataclass(frozen=True, slots=True)
class Call:
    """A function, a question that it answers, and the arguments the question names."""

    name: str
    fields: str
    question: str
    expected: dict[str, Any]


CALLS = (
    Call(
        "get_weather",
        "city:string! unit:celsius|fahrenheit!",
        "What is the weather in Paris in celsius?",
        {"city": "Paris", "unit": "celsius"},
    ),
    Call(
        "convert_currency",
        "amount:number! from_currency:string! to_currency:string!",
        "Convert 250 USD to EUR.",
        {"amount": 250, "from_currency": "USD", "to_currency": "EUR"},
    ),
    Call(
        "calculate_triangle_area",
        "base:number! height:number!",
        "What is the area of a triangle with a base of 10 and a height of 5?",
        {"base": 10, "height": 5},
    ),
    Call("set_alarm", "hour:integer! minute:integer!", "Set an alarm for 7:30.", {"hour": 7, "minute": 30}),
    Call(
        "send_email",
        "recipient:string! subject:string!",
        "Send an email to anna@example.com with the subject Meeting.",
        {"recipient": "anna@example.com", "subject": "Meeting"},
    ),
    Call("get_stock_price", "symbol:string!", "What is the price of the stock AAPL?", {"symbol": "AAPL"}),
    Call(
        "translate_text",
        "text:string! target_language:string!",
        "Translate 'Good morning' to French.",
        {"text": "Good morning", "target_language": "French"},
    ),
    Call(
        "book_flight",
        "origin:string! destination:string! passengers:integer!",
        "Book a flight from London to Tokyo for 2 passengers.",
        {"origin": "London", "destination": "Tokyo", "passengers": 2},
    ),
    Call("calculate_factorial", "number:integer!", "What is the factorial of 5?", {"number": 5}),
    Call(
        "find_restaurants",
        "city:string! cuisine:string!",
        "Find Italian restaurants in Boston.",
        {"city": "Boston", "cuisine": "Italian"},
    ),
    Call(
        "create_reminder",
        "title:string! date:date!",
        "Remind me of 'Dentist' on 2025-03-14.",
        {"title": "Dentist", "date": "2025-03-14"},
    ),
    Call("get_population", "country:string!", "What is the population of Brazil?", {"country": "Brazil"}),
    Call(
        "turn_on_light",
        "room:kitchen|bedroom|bathroom! brightness:integer!",
        "Turn on the light in the kitchen with a brightness of 80.",
        {"room": "kitchen", "brightness": 80},
    ),
    Call(
        "play_music",
        "artist:string! song:string!",
        "Play the song Imagine by John Lennon.",
        {"artist": "John Lennon", "song": "Imagine"},
    ),
    Call(
        "calculate_bmi",
        "weight_kg:number! height_m:number!",
        "What is the BMI of a person of 70 kg and 1.75 m?",
        {"weight_kg": 70, "height_m": 1.75},
    ),
    Call(
        "search_books",
        "author:string! limit:integer!",
        "Find 3 books by Jane Austen.",
        {"author": "Jane Austen", "limit": 3},
    ),
    Call(
        "get_distance",
        "start:string! end:string!",
        "How far is it from Berlin to Munich?",
        {"start": "Berlin", "end": "Munich"},
    ),
    Call("add_numbers", "first:integer! second:integer!", "Add 17 and 25.", {"first": 17, "second": 25}),
    Call("get_capital", "country:string!", "What is the capital of France?", {"country": "France"}),
    Call(
        "create_user",
        "username:string! email:string! is_admin:boolean!",
        "Create the user bob with the email bob@example.com, who is not an admin.",
        {"username": "bob", "email": "bob@example.com", "is_admin": False},
    ),
    Call(
        "calculate_loan",
        "principal:number! interest_rate:number! years:integer!",
        "What is the payment of a loan of 10000 at 5 percent for 3 years?",
        {"principal": 10000, "interest_rate": 5, "years": 3},
    ),
    Call("get_time", "timezone:string!", "What time is it in the timezone UTC?", {"timezone": "UTC"}),
    Call("delete_file", "path:string! force:boolean", "Delete the file notes.txt.", {"path": "notes.txt"}),
    Call(
        "get_movie_details",
        "title:string! year:integer!",
        "Give me details of the movie Titanic from 1997.",
        {"title": "Titanic", "year": 1997},
    ),
)

SCHEMAS = {
    "a person": "name:string! age:integer! email:email! is_student:boolean!",
    "an address": "street:string! city:string! zip_code:string! country:string!",
    "a book": "title:string! author:string! year:integer! genres:[string]!",
    "a movie": "title:string! director:string! release_date:date! rating:number!",
    "a recipe": "name:string! servings:integer! ingredients:[string]! steps:[string]!",
    "a product": "name:string! price:number! currency:USD|EUR|GBP! in_stock:boolean!",
    "a country": "name:string! capital:string! population:integer! continent:Africa|America|Asia|Europe|Oceania!",
    "a city": "city_name:string! country_name:string! latitude:number! longitude:number!",
    "the weather": "location:string! temperature_celsius:number! condition:sunny|cloudy|rainy|snowy!",
    "a calendar event": "event_title:string! start_time:time! date:date! attendees:[string]!",
    "a user account": "user_name:string! email_address:email! account_type:free|premium|enterprise!",
    "an order": "order_id:integer! customer:string! status:pending|shipped|delivered|cancelled! total_amount:number!",
    "an invoice": "invoice_number:string! issue_date:date! amount_due:number! is_paid:boolean!",
    "a review": "product_name:string! stars:integer! comment:string! would_recommend:boolean!",
    "a song": "song_title:string! artist_name:string! duration_seconds:integer! genre:string!",
    "an album": "album_title:string! artist:string! tracks:[string]! release_year:integer!",
    "a dog": "name:string! breed:string! age_years:integer! vaccinated:boolean!",
    "a car": "make:string! model:string! production_year:integer! fuel_type:petrol|diesel|electric|hybrid!",
    "a flight": "flight_number:string! departure_airport:string! arrival_airport:string! duration_minutes:integer!",
    "a hotel": "hotel_name:string! stars:integer! price_per_night:number! has_breakfast:boolean!",
    "a restaurant": "restaurant_name:string! cuisine:string! price_range:cheap|moderate|expensive! open:string!",
    "a job": "job_title:string! company_name:string! salary:integer! is_remote:boolean!",
    "a school class": "subject:string! teacher_name:string! number_of_students:integer! room:string!",
    "a quiz question": "question:string! possible_answers:[string]! correct_answer:string!",
    "a task": "task_name:string! priority:low|medium|high! completed:boolean! due_date:date!",
    "a bug report": "summary:string! severity:minor|major|critical! steps_to_reproduce:[string]!",
    "a planet": "planet_name:string! number_of_moons:integer! has_rings:boolean! diameter_km:number!",
    "an element": "element_name:string! symbol:string! atomic_number:integer! state:solid|liquid|gas!",
    "a bank account": "account_holder:string! account_balance:number! account_currency:string!",
    "a sports match": "home_team:string! away_team:string! home_score:integer! away_score:integer!",
    "a football player": "player_name:string! position:goalkeeper|defender|midfielder|forward! shirt_number:integer!",
    "a sentiment": "sentiment:positive|neutral|negative! confidence:number! explanation:string!",
    "a summary": "headline:string! key_points:[string]! word_count:integer!",
    "a server configuration": "host_name:string! port_number:integer! tls:boolean! level:debug|info|warning|error!",
    "a blog post": "post_title:string! author_name:string! published_date:date! tags:[string]!",
    "a museum": "museum_name:string! location_city:string! founded_year:integer! free_entrance:boolean!",
    "a plant": "common_name:string! scientific_name:string! needs_sunlight:boolean! height_cm:number!",
    "a medical appointment": "patient_name:string! doctor_name:string! appointment_date:date! reason:string!",
    "a language": "language_name:string! number_of_speakers:integer! writing_system:string!",
    "a game": "game_title:string! platforms:[string]! multiplayer:boolean! minimum_age:integer!",
}


def cases() -> list[tuple[str, list[dict[str, str]], GrammarSpec, dict[str, Any], dict[str, Any]]]:
    """Kind, conversation, grammar, schema, and what is expected of the values."""
    found = []
    for call in CALLS:
        schema = object_of(call.fields)
        spec = tool_grammar(FORMATS["hermes"], [ToolSpec(call.name, schema, True)], "required", parallel=False)
        assert spec is not None
        told = f"You call functions. There is one: {json.dumps({'name': call.name, 'parameters': schema})}"
        messages = [{"role": "system", "content": told}, {"role": "user", "content": call.question}]
        found.append(("functions", messages, spec, schema, call.expected))
    for topic, fields in SCHEMAS.items():
        schema = object_of(fields)
        messages = [{"role": "user", "content": f"Write JSON about {topic}. Be brief."}]
        found.append(("schemas", messages, GrammarSpec.json(schema), schema, {}))
    return found
