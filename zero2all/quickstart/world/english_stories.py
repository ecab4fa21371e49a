"""The story grammar in English."""

from __future__ import annotations

from zero2all.quickstart.world.stories import Arc, StoryBook

LOST_THING = Arc(
    title="{hero} and the {object}",
    scenes=(
        (
            "There {hero} noticed that {his} {object} was gone.",
            "Suddenly {hero} reached for {his} {object}, but it was not there.",
            "{hero} wanted to take out {his} {object}, but the bag was empty.",
            "Only then did {hero} see that the {object} was missing.",
        ),
        (
            "{He} felt {sad} and did not know what to do.",
            "{hero} looked everywhere and grew more and more {sad}.",
            "For a while {he} just stood there, {sad} and quiet.",
        ),
        (
            '{friend} said, "Let us look for it together."',
            "{friend} saw {his} face and offered to help.",
            '"Do not give up," said {friend}. "Four eyes see more than two."',
        ),
        (
            "They searched for a long time, and at last {friend} found the {object} {hiding}.",
            "After an hour {friend} saw something {hiding}, and it was the {object}.",
            "They had almost given up when {friend} found it {hiding}.",
        ),
        (
            "To say thank you, {hero} shared {his} {food} with {friend}.",
            "{hero} laughed, and they shared {his} {food}.",
            "Then {hero} took out some {food}, and the two of them ate it together.",
        ),
    ),
    questions=(
        ("What did {hero} lose?", "The {object}."),
        ("Who found the {object}?", "{friend} found it."),
        ("Where was the {object}?", "It was {hiding}."),
        ("What did they share?", "Some {food}."),
    ),
    slots={
        "object": (
            "red kite",
            "silver key",
            "blue scarf",
            "wooden whistle",
            "paper map",
            "green umbrella",
            "little drum",
            "music box",
            "leather ball",
            "brass compass",
        ),
        "hiding": (
            "under a bench",
            "behind a stone",
            "in the tall grass",
            "beside the well",
            "between two roots",
            "on a low wall",
            "under a heap of leaves",
        ),
    },
)

HURT_ANIMAL = Arc(
    title="{hero} and the {animal}",
    scenes=(
        (
            "In the grass {hero} found a little {animal} that could not walk.",
            "{hero} saw a small {animal} that lay beside the path and did not move.",
            "From behind a bush came a thin cry, and there sat a little {animal}.",
        ),
        (
            "Its leg was hurt, and it was trembling.",
            "It had a thorn in its foot.",
            "It looked hungry and afraid.",
        ),
        (
            "{hero} wrapped it in {his} {cloth} and carried it to {friend}.",
            "Very gently {he} put it into {his} {cloth} and ran to {friend}.",
            "{He} made a soft bed out of {his} {cloth} and called {friend}.",
        ),
        (
            "{friend} cleaned the wound and gave it some {animal_food}.",
            "{friend} knew what to do and brought {animal_food}.",
            '"It needs {animal_food} and rest," said {friend}, and {friend} was right.',
        ),
        (
            "After {days} days the {animal} was well again and went back to the wild.",
            "It took {days} days, and then the {animal} could run again.",
            "The {animal} stayed for {days} days, and then they set it free.",
        ),
    ),
    questions=(
        ("What did {hero} find?", "A little {animal}."),
        ("Who helped the {animal}?", "{friend} and {hero}."),
        ("What was the {animal} given?", "Some {animal_food}."),
        ("How long did it take?", "It took {days} days."),
        ("What did {hero} put the {animal} in?", "In {his} {cloth}."),
    ),
    slots={
        "animal": ("bird", "fox", "hedgehog", "duckling", "lamb", "squirrel", "deer", "badger"),
        "cloth": ("coat", "scarf", "jacket", "blanket", "sweater"),
        "animal_food": ("warm milk", "fresh water", "soft bread", "berries", "seeds"),
        "days": ("three", "four", "five", "six", "ten"),
    },
)

MAKING = Arc(
    title="How {hero} made a {thing}",
    scenes=(
        (
            "{hero} wanted to make a {thing} for {relative}.",
            "{hero} had a plan: {he} would build a {thing} and give it to {relative}.",
            "The birthday of {relative} was near, and {hero} wanted to make a {thing}.",
        ),
        (
            "The first one broke at once.",
            "The first try was so crooked that {he} had to laugh.",
            "It looked good, but it fell apart in {his} hands.",
        ),
        (
            "{hero} was {sad}, but {friend} only smiled.",
            "{He} grew {sad} and wanted to stop.",
            "{hero} sat down on the floor, tired and {sad}.",
        ),
        (
            '"You have forgotten the {material}," said {friend}.',
            "{friend} looked at it and said that it needed more {material}.",
            'Then {friend} brought some {material} and said, "Try it with this."',
        ),
        (
            "The second {thing} was strong and beautiful.",
            "Now it worked, and the {thing} was ready before dark.",
            "This time {he} worked slowly, and the {thing} turned out well.",
        ),
    ),
    questions=(
        ("What did {hero} make?", "A {thing}."),
        ("For whom was the {thing}?", "It was for {relative}."),
        ("What was missing at first?", "The {material}."),
        ("Who gave {hero} advice?", "{friend} did."),
    ),
    slots={
        "place": ("the workshop", "the barn", "the garden shed", "the school", "the blacksmith's yard"),
        "thing": ("paper boat", "bird house", "lantern", "wooden sled", "toy bridge", "kite", "small table"),
        "material": ("glue", "string", "nails", "wax", "wire", "strong paper"),
    },
)

STORM = Arc(
    title="{hero} in the storm",
    scenes=(
        (
            "They were going to visit {relative} when the sky turned dark.",
            "On the way to see {relative}, a storm came up.",
            "They set out to see {relative}, but soon the first thunder rolled.",
        ),
        (
            "The rain was so strong that nobody could see the path.",
            "In a minute their shoes were full of water.",
            "The wind tore at their coats.",
        ),
        (
            "{friend} pointed to {shelter}, and they ran.",
            '"Quick, over there!" called {friend}, and they hid in {shelter}.',
            "Luckily {friend} knew {shelter}, and there they waited.",
        ),
        (
            "{hero} had some {food} with {him}, so they were not hungry.",
            "To pass the time, {hero} took out {his} {food}, and they ate.",
            "They sat close together and shared the {food} that {hero} had brought.",
        ),
        (
            "When the rain stopped, there was {after} over the fields.",
            "After {hours} hours it was quiet, and they saw {after}.",
            "At last the clouds opened, and {after} stood in the sky.",
        ),
    ),
    questions=(
        ("Whom did they want to visit?", "They wanted to visit {relative}."),
        ("Where did they hide?", "In {shelter}."),
        ("Who knew where to go?", "{friend} did."),
        ("What did they eat?", "Some {food}."),
        ("What did they see after the storm?", "They saw {after}."),
    ),
    slots={
        "weather": ("sunny", "windy", "warm", "cloudy", "quiet"),
        "shelter": ("an old barn", "a dry cave", "an empty tower", "a hut of branches", "a stable", "a broken wagon"),
        "after": ("a rainbow", "a pale moon", "a red sun", "the first star"),
        "hours": ("two", "three", "four"),
    },
)

QUARREL = Arc(
    title="The quarrel about the {object}",
    scenes=(
        (
            "Both of them wanted to play with the {object}.",
            "There was only one {object}, and both wanted it.",
            "{hero} took the {object}, and {friend} wanted it too.",
        ),
        (
            "They pulled at it until it broke.",
            "They shouted at each other, and in the end the {object} fell down and broke.",
            "Neither would let go, and with a loud crack it broke.",
        ),
        (
            "{friend} went away to {retreat} without a word.",
            "{friend} ran off to {retreat} and would not speak.",
            "Angry and silent, {friend} walked to {retreat}.",
        ),
        (
            "{hero} felt {sad} and repaired it with {material}.",
            "All afternoon {hero} was {sad}, and then {he} mended it with {material}.",
            "{hero} could not stop thinking about it, so {he} took some {material} and put it together again.",
        ),
        (
            'Then {he} went to {friend} and said, "I am sorry. You may have it first."',
            '{He} brought it to {friend} and said, "Let us take turns."',
            '"It was my fault," {he} told {friend}, and {friend} smiled again.',
        ),
    ),
    questions=(
        ("What did they quarrel about?", "About the {object}."),
        ("Where did {friend} go?", "To {retreat}."),
        ("How did {hero} mend the {object}?", "With {material}."),
        ("Who said sorry?", "{hero} did."),
    ),
    slots={
        "object": ("swing", "toy train", "drum", "red kite", "puppet", "wooden horse", "little boat", "marble run"),
        "retreat": ("the stable", "the old bridge", "the kitchen", "the apple tree", "the well", "the roof"),
        "material": ("glue", "string", "nails", "wire", "leather"),
    },
)

TRADE = Arc(
    title="{hero} trades a {object}",
    scenes=(
        (
            "{hero} had a {object} that {he} no longer needed.",
            "In {his} bag {hero} carried a {object} to trade.",
            "{hero} hoped to trade {his} {object} for something better.",
        ),
        (
            "A {seller} offered {him} a {wish} for it.",
            "At a stall a {seller} showed {him} a {wish}.",
            "Then {he} met a {seller} who had a {wish}.",
        ),
        (
            "{He} was not sure and asked {friend}.",
            '"Is that a fair trade?" {he} asked {friend}.',
            "{He} thought about it and looked at {friend}.",
        ),
        (
            "{friend} nodded, and so {hero} gave away the {object} and got the {wish}.",
            '"I would do it," said {friend}. So {hero} took the {wish} and handed over the {object}.',
            "{friend} said yes, and the {object} was traded for the {wish}.",
        ),
        (
            "The {seller} was pleased as well and added some {food}.",
            'The {seller} laughed and said, "Here is some {food} for the way home."',
            "As a gift, the {seller} also gave them {food}.",
        ),
    ),
    questions=(
        ("What did {hero} give away?", "The {object}."),
        ("What did {hero} get?", "A {wish}."),
        ("With whom did {hero} trade?", "With a {seller}."),
        ("Whom did {hero} ask?", "{hero} asked {friend}."),
        ("What did the {seller} add?", "Some {food}."),
    ),
    slots={
        "place": ("the market", "the harbour", "the village square", "the fair", "the railway station"),
        "object": ("wool hat", "tin cup", "pocket knife", "glass bottle", "picture book", "basket", "lamp"),
        "wish": ("flute", "magnifying glass", "fishing rod", "warm blanket", "puzzle", "little mirror", "bell"),
        "seller": ("farmer", "peddler", "fisher", "shepherd", "weaver", "miller"),
    },
)

GARDEN = Arc(
    title="The {plant} of {hero}",
    scenes=(
        (
            "{hero} had got the seed of a {plant} from {relative} and put it into a hole.",
            "{hero} planted the seed of a {plant} that came from {relative}.",
            "With a spoon {hero} put the seed of a {plant} into the ground; it was a present from {relative}.",
        ),
        (
            "For many days nothing happened, and {he} was {sad}.",
            "Every morning {he} looked, but there was only earth, and it made {him} {sad}.",
            "A week went by without a leaf, and {hero} felt {sad}.",
        ),
        (
            '"Be patient," said {friend}. "Give it {care}."',
            "{friend} told {him} to give it {care} and to wait.",
            "{friend} came every day and brought {care}.",
        ),
        (
            "Then one morning a green tip came out of the ground.",
            "After a warm night there was a tiny leaf.",
            "One day the earth opened, and something green looked out.",
        ),
        (
            "By {season} the {plant} was taller than {hero}.",
            "In {season} everyone came to see the {plant}.",
            "It grew and grew, and in {season} it was the finest {plant} in the village.",
        ),
    ),
    questions=(
        ("What did {hero} plant?", "A {plant}."),
        ("Who gave {hero} the seed?", "It came from {relative}."),
        ("What did the plant need?", "It needed {care}."),
        ("When was the {plant} big?", "In {season}."),
        ("Who told {hero} what to do?", "{friend} did."),
    ),
    slots={
        "place": ("the school garden", "the yard behind the house", "the meadow", "the field by the road"),
        "weather": ("sunny", "rainy", "windy", "warm", "cloudy", "quiet"),
        "plant": ("sunflower", "pumpkin", "bean", "rose", "melon", "cherry tree", "pear tree"),
        "care": ("more water", "more light", "better soil", "a little shade"),
        "season": ("summer", "autumn", "June", "July", "August"),
    },
)

NOISE = Arc(
    title="The noise in the night",
    scenes=(
        (
            "At night {hero} heard a {sound} from {spot}.",
            "When the lamp was out, there was a {sound} from {spot}.",
            "In the middle of the night a {sound} came from {spot}.",
        ),
        (
            "{hero} pulled the blanket over {his} head.",
            "{hero} lay awake, and {his} heart beat fast.",
            '"Is that a ghost?" thought {hero}.',
        ),
        (
            "{He} woke {friend}, and they took a {light}.",
            "{friend} had heard it too and was holding a {light}.",
            '"Come," whispered {friend} and picked up a {light}.',
        ),
        (
            "Step by step they went to {spot}.",
            "Holding hands, they walked to {spot}.",
            "The floor creaked under their feet as they came to {spot}.",
        ),
        (
            "There they found {cause}, and nothing else.",
            "And what did they see? It was only {cause}.",
            "They had to laugh, because it was just {cause}.",
        ),
    ),
    questions=(
        ("What did {hero} hear?", "A {sound}."),
        ("Where did the noise come from?", "From {spot}."),
        ("Who went with {hero}?", "{friend} did."),
        ("What made the noise?", "It was {cause}."),
        ("What did they carry?", "A {light}."),
    ),
    slots={
        "place": ("the cottage on the hill", "the farm of an uncle", "a small inn", "the house by the lake"),
        "sound": ("knocking", "scratching", "whistling", "soft crying", "rattling", "humming"),
        "spot": ("the attic", "the cellar", "the kitchen", "the stairs", "the old cupboard", "the chimney"),
        "light": ("candle", "lantern", "torch", "small lamp"),
        "cause": ("an owl", "a loose shutter", "the wind", "a hungry mouse", "a dripping pipe", "an old clock"),
    },
)

CONTEST = Arc(
    title="The {contest}",
    scenes=(
        (
            "That day there was a {contest}, and the prize was a {prize}.",
            "Everyone had come for the {contest}, because the winner would get a {prize}.",
            "A {contest} was held there, with a {prize} for the winner.",
        ),
        (
            "{hero} had practised for {weeks} weeks.",
            "For {weeks} weeks {hero} had trained for this day.",
            "It had taken {hero} {weeks} weeks to get ready.",
        ),
        (
            "At first {friend} was in front.",
            "{friend} made the better start.",
            "In the beginning everyone thought that {friend} would win.",
        ),
        (
            "Then {rival} slipped, and {hero} stopped to help.",
            "Halfway through, {rival} needed help, and only {hero} turned back.",
            "When {rival} got into trouble, {hero} did not think of the prize and helped.",
        ),
        (
            "So {friend} won the {prize} and gave half of the honour to {hero}.",
            "In the end {friend} won the {prize}, but the loudest cheers were for {hero}.",
            "{friend} came in first and got the {prize}; still, everybody talked about {hero}.",
        ),
    ),
    questions=(
        ("What was the prize?", "A {prize}."),
        ("Who won?", "{friend} won."),
        ("Whom did {hero} help?", "{hero} helped {rival}."),
        ("How long did {hero} practise?", "For {weeks} weeks."),
    ),
    slots={
        "place": ("the river", "the beach", "the harbour", "the lake"),
        "weather": ("sunny", "windy", "warm", "cloudy", "quiet"),
        "contest": ("running race", "boat race", "spelling contest", "drawing contest", "swimming race", "sack race"),
        "prize": ("golden cup", "big cake", "silver medal", "new bicycle", "book of tales", "blue ribbon"),
        "rival": ("a small boy", "a little girl", "an old man", "a stranger", "the youngest child"),
        "weeks": ("two", "three", "four", "six", "eight"),
    },
)

MESSAGE = Arc(
    title="{hero} carries a {parcel}",
    scenes=(
        (
            "{hero} had promised {relative} to carry a {parcel} to {goal}.",
            "{hero} was to bring a {parcel} from {relative} to {goal}.",
            "There {hero} got a {parcel} from {relative}, and it had to be at {goal} by nightfall.",
        ),
        (
            "At a fork in the road {he} did not know which way to go.",
            "Soon {he} lost the way.",
            "Halfway there, the path ended at a stream.",
        ),
        (
            "{friend} had come after {him} and knew the way: past {landmark}.",
            "Then {friend} came running and pointed to {landmark}.",
            '"Go past {landmark}," called {friend}, who had followed {him}.',
        ),
        (
            "{hero} ran as fast as {he} could.",
            "{He} held the {parcel} tight and did not stop once.",
            "It was far, but {he} sang all the way.",
        ),
        (
            "The people at {goal} were waiting and gave {him} some {food}.",
            "{He} arrived just in time and got {food} as a reward.",
            '"Well done," they said at {goal}, and there was {food} for {him}.',
        ),
    ),
    questions=(
        ("What did {hero} carry?", "A {parcel}."),
        ("Who sent the {parcel}?", "It came from {relative}."),
        ("Where did {hero} have to go?", "To {goal}."),
        ("Who showed {hero} the way?", "{friend} did."),
        ("What did {hero} have to pass?", "{hero} had to pass {landmark}."),
        ("What was the reward?", "Some {food}."),
    ),
    slots={
        "parcel": ("letter", "small box", "jar of honey", "sack of flour", "roll of cloth", "medicine bottle"),
        "goal": ("the castle", "the monastery", "the lighthouse", "the mountain hut", "the far farm", "the ferry"),
        "landmark": ("the tall oak", "the white rock", "the ruined wall", "the three birches", "the stone cross"),
    },
)

ENGLISH_STORIES = StoryBook(
    people=(
        (
            ("Anna", "Lucy", "Nora", "Emma", "Ruth", "Clara", "Ivy", "Molly"),
            {"he": "she", "He": "She", "his": "her", "him": "her"},
        ),
        (
            ("Ben", "Tom", "Leo", "Max", "Sam", "Oscar", "Hugo", "Finn"),
            {"he": "he", "He": "He", "his": "his", "him": "him"},
        ),
    ),
    slots={
        "weather": ("sunny", "rainy", "windy", "cold", "warm", "foggy", "snowy", "cloudy", "quiet", "frosty"),
        "time": ("morning", "afternoon", "evening", "day"),
        "place": (
            "the river",
            "the market",
            "the old mill",
            "the park",
            "the beach",
            "the library",
            "the village square",
            "the railway station",
            "the edge of the forest",
            "the harbour",
            "the school garden",
            "the lake",
        ),
        "sad": ("sad", "worried", "upset", "unhappy", "gloomy"),
        "happy": ("happy", "proud", "grateful", "cheerful", "glad", "content"),
        "relative": ("an old aunt", "the neighbour", "a cousin", "the miller", "the postman", "a sick friend"),
        "food": ("apple pie", "bread", "cheese", "chocolate", "plum cake", "gingerbread", "honey bread", "dried fruit"),
    },
    openings=(
        "One {weather} {time}, {hero} was at {place} with {friend}.",
        "It was a {weather} {time}, and {hero} and {friend} were at {place}.",
        "On a {weather} {time}, {hero} and {friend} met at {place}.",
        "{hero} and {friend} had gone to {place} on a {weather} {time}.",
        "The {time} was {weather}, and {hero} walked to {place} with {friend}.",
    ),
    details=(
        "Far away a dog barked.",
        "A cart rolled by.",
        "The church clock struck.",
        "Two crows watched from a roof.",
        "The air smelled of hay.",
        "Somebody was singing behind a window.",
        "A cat crossed the road and looked at nobody.",
        "Smoke rose from a chimney.",
        "The leaves moved a little.",
        "A child waved from a gate.",
    ),
    asides=(
        "Before they went home, {friend} told {hero} something from school.",
        "While they rested, {hero} said what {he} had learned that week.",
        "An old man on a bench liked to tell people what he knew.",
        'A woman passing by asked, "Did you know this?"',
        "{friend} took out a little book and read from it.",
    ),
    closings=(
        "{hero} went home and felt {happy}.",
        "That night {hero} fell asleep, tired and {happy}.",
        "In the end {hero} was {happy}, and so was {friend}.",
        "{hero} thought about it for a long time and was {happy}.",
        "When the day was over, {hero} felt {happy}.",
    ),
    questions=(
        ("Where were {hero} and {friend}?", "At {place}."),
        ("How did {hero} feel in the end?", "{hero} felt {happy}."),
        ("What was the {time} like?", "It was {weather}."),
    ),
    question_and_answer="Q: {question} A: {answer}",
    arcs=(LOST_THING, HURT_ANIMAL, MAKING, STORM, QUARREL, TRADE, GARDEN, NOISE, CONTEST, MESSAGE),
)
