"""Words for prompts. A change of the words changes every prompt, and so the hashes of prompts, which identify cases.

The package has its own words, so that a seed gives the same prompts on every machine, independently of the releases of
other packages.
"""

import random
from collections.abc import Iterator, Sequence

_ADJECTIVES = """\
able absent acid active actual adult afraid agile alert alive alone amber ample ancient angry annual anxious apt
arctic ardent arid aware awful awkward bare basic beige big bitter black bland blank bleak blind blond blue blunt bold
bored boring brave brief bright brisk broad broken bronze brown bulky busy calm candid careful casual cautious central
certain cheap cheerful chief chilly civil classic clean clear clever close cloudy clumsy coarse cold common compact
complex cool coral correct cosmic costly cozy crazy creamy crimson crisp crooked crowded crude cruel curious curly
current curved daily damp dapper daring dark dear decent deep dense diligent dim direct dirty distant dizzy double
drowsy dry dual dull durable dusty eager early earnest easy elastic elder elegant empty endless equal eternal even
exact exotic extra faded faint fair faithful false familiar famous fancy far fast fearless fertile fierce final fine
firm fit flat fluffy fluid foggy fond foreign formal fragile frank free frequent fresh friendly frosty frozen full
funny fuzzy gentle genuine giant gifted glad global gloomy glossy golden good graceful grand grateful grave gray great
green grim happy hard harsh hasty hazy healthy heavy helpful hidden high hollow honest hot huge humble humid hungry
icy ideal idle immense inner intense ivory jolly joyful junior just keen kind large last late lavish lazy lean legal
light likely limp linear little lively local lonely long loose loud lovely low loyal lucky lunar mad magic main major
male marine mellow merry mighty mild minor misty mobile modern modest moist moral muddy mute mutual naive narrow
native neat nervous neutral new nimble noble noisy normal novel numb oblique obvious odd old open oral orange ordinary
outer oval pale partial patient perfect petty plain playful pleasant plump polite poor popular precious pretty prime
private prompt proper proud public pure purple quaint quick quiet radiant rapid rare raw ready real recent red regal
regular remote rich rigid ripe robust rotten rough round royal rude rugged rural rusty sacred sad safe salty sandy
scarce scarlet secret secure senior serene serious severe shaggy shallow sharp shiny short shy silent silky silly
silver simple sincere single skilled sleepy slender slim slow small smart smooth snowy sober social soft solar solemn
solid sore sour sparse special spicy spotless square stable stale stark steady steep stern sticky stiff still stormy
stout straight strange strict strong stubborn sturdy subtle sudden sunny super sure sweet swift tall tame tan tangy
tart tender tense thick thin thirsty tidy tight tiny tired tough tranquil tricky tropical true typical ugly unique
upper urban urgent useful usual vacant vague valid vast velvet verbal vital vivid warm weak weary weird western wet
white whole wicked wide wild windy wise witty wooden woolly worthy yellow young zesty
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
"""Distinct adjectives, none of them in `NOUNS`."""

_NOUNS = """\
acorn actor airport album alley almond anchor angle ankle answer ant apple apron arch arena arm army arrow artist
atlas attic aunt autumn axe baby badge bag baker balcony ball bamboo banana band bank barn barrel basin basket bat
bath beach bead beak bean bear beard beast bed bee beetle bell belt bench berry bicycle bird biscuit blanket blossom
boat body bolt bone book boot border bottle boulder bowl box branch bread breeze brick bridge broom brother bucket bug
builder bulb bus bush butter button cabin cable cactus cage cake camel camera camp canal candle canoe canvas canyon
cap captain car card cargo carpet carrot cart castle cat cave ceiling cellar chain chair chalk cheese cherry chest
chicken child chimney church cigar circle city clay cliff clock cloth cloud clover coach coast coat coffee coin collar
comet compass cookie copper cork corn corner cotton couch country cousin cow crab crane crayon creek cricket crown
crystal cup curtain cushion dagger dairy dance daughter dawn deer desert desk diamond dinner dish ditch doctor dog
doll dolphin donkey door dove dragon drawer dream dress driver drum duck dust eagle ear earth echo edge egg elbow
elephant engine evening eye face factory falcon family farmer father feather fence fern ferry field fig finger fire
fish flag flame flood floor flour flower flute fog food foot forest fork fossil fountain fox frame friend frog fruit
gallery game garage garden garlic gate ghost giraffe girl glacier glass glove goat goose grain grape grass guest
guitar gull hammer hand harbor harp hat hawk hay heart hedge helmet hen herb hero hill hinge hive honey hood hook horn
horse hotel hour house hut iceberg idea igloo ink insect iris iron island jacket jaguar jar jeans jelly jewel journal
judge juice jungle kettle key king kitchen kite kitten knee knife knight knot ladder lady lagoon lake lamb lamp
lantern lawn lawyer leaf leather lemon leopard letter library lily lime lion lip lizard lobster lock log lunch lynx
machine magnet mango map maple marble market mask meadow melon mirror mole monkey moon moose morning moss mother
mountain mouse mouth muffin museum mushroom music nail napkin nature neck needle nephew nest net nickel night noodle
north nose notebook nurse nut oak oasis oat ocean office olive onion orchard organ otter oven owl oxygen oyster paddle
page paint palace palm pan panda paper park parrot path peach peacock pear pearl pebble pen pencil penguin pepper
piano picnic pie pig pigeon pillow pilot pine pirate pitcher planet plate plum pocket poem poet pond pony porch potato
prince pumpkin puppet puppy queen quilt rabbit radio rain raven ribbon rice river road robin robot rocket roof room
root rope rose ruby rug ruler sail salad salmon salt sand sandal scarf school scout sea seal season seed shadow shark
sheep shelf shell ship shirt shoe shore shovel shrimp sister skate skirt sky sled slipper snail snake snow soap sock
sofa soldier song soup spark sparrow spider spoon spring squirrel stamp star station statue stone storm stove straw
stream street student sugar suit summer sun swan sword table tailor tea teacher temple tent thread throne thumb
thunder ticket tiger timber toad toast tomato tooth torch tower town toy tractor train tray treasure tree truck
trumpet tulip tunnel turkey turtle uncle valley vase vest village vine violin visitor voice volcano wagon waiter wall
walnut walrus water wave wax weasel whale wheat wheel whistle willow window wine winter wizard wolf woman wood wool
worm wrist yard zebra
"""
NOUNS = tuple(_NOUNS.split())
"""Distinct nouns."""

_CITIES = """\
Accra Amsterdam Ankara Athens Auckland Bangkok Barcelona Beijing Belgrade Berlin Bogota Boston Brisbane Brussels
Bucharest Budapest Cairo Calgary Canberra Casablanca Chennai Chicago Copenhagen Dakar Dallas Damascus Delhi Denver
Dublin Durban Edinburgh Florence Frankfurt Geneva Glasgow Hamburg Hanoi Harare Havana Helsinki Houston Istanbul
Jakarta Johannesburg Kabul Karachi Kathmandu Khartoum Kigali Kingston Kinshasa Kyoto Lagos Leipzig Lima Lisbon
Liverpool London Luanda Lusaka Lyon Madrid Manila Maputo Marseille Melbourne Miami Milan Minsk Montreal Moscow Mumbai
Munich Nairobi Naples Osaka Oslo Ottawa Paris Perth Porto Prague Quito Reykjavik Riga Rome Rotterdam Santiago Seattle
Seoul Seville Shanghai Singapore Sofia Stockholm Sydney Taipei Tallinn Tashkent Tbilisi Tehran Tokyo Toronto Toulouse
Tunis Turin Vancouver Vienna Vilnius Warsaw Wellington Yerevan Zagreb Zurich
"""
CITIES = tuple(_CITIES.split())
"""Distinct cities with one-word names."""


def distinct_pairs(
    rng: random.Random, adjectives: Sequence[str] = ADJECTIVES, nouns: Sequence[str] = NOUNS
) -> Iterator[str]:
    """Yield distinct indices `adjective-noun`. Raises ValueError when all are taken."""
    seen: set[int] = set()
    total = len(adjectives) * len(nouns)
    while len(seen) < total:
        if (drawn := rng.randrange(total)) not in seen:
            seen.add(drawn)
            adjective, noun = divmod(drawn, len(nouns))
            yield f"{adjectives[adjective]}-{nouns[noun]}"
    raise ValueError(f"all {total:,} pairs of words are taken: ask for a shorter context")
