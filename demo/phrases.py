"""Word lists and small talk from which the conversations are made. Data only."""

from __future__ import annotations


def words(text: str) -> list[str]:
    """The entries of a list written with bars between them, over any number of lines."""
    return [entry.strip() for entry in " ".join(text.split()).split("|") if entry.strip()]


def _exchanges(text: str) -> list[tuple[list[str], list[str]]]:
    """Paragraphs, each of what a user may say, with bars between, and after ``=>`` the answers likewise."""
    pairs = (paragraph.split("=>") for paragraph in text.strip().split("\n\n"))
    return [(words(said), words(answers)) for said, answers in pairs]


PETS = words(
    """
    cat | dog | parrot | hamster | rabbit | horse | pony | goldfish | turtle | snake | lizard | mouse | rat
    | guinea pig | canary | duck | hen | goat | sheep | cow | donkey | ferret | frog | spider | tortoise |
    budgie | kitten | puppy | bird | fish | gecko | pig | chicken
    """
)
FAMILY = words(
    """
    sister | brother | mother | father | aunt | uncle | cousin | daughter | son | wife | husband |
    grandmother | grandfather | niece | nephew | friend | neighbour | boss | teacher | doctor | partner |
    girlfriend | boyfriend | mum | dad | mom | grandma | grandpa | baby | child | roommate | colleague |
    dentist | best friend | twin
    """
)
THINGS = words(
    """
    app | band | bicycle | bike | boat | book | cactus | camera | car | caravan | clock | club | company |
    computer | doll | dragon | drone | drum | farm | film | game | garden | guitar | house | island | kettle
    | kingdom | kite | lamp | laptop | monster | motorbike | novel | phone | piano | plane | plant | printer
    | project | restaurant | robot | school | scooter | server | ship | shop | sofa | song | statue | street
    | sword | tablet | team | teapot | teddy bear | town | tractor | tree | truck | umbrella | van | village
    | violin | website
    """
)
COLOURS = words(
    """
    red | blue | green | yellow | black | white | brown | grey | pink | purple | orange | silver | gold |
    turquoise | violet | beige | navy | crimson | teal | magenta
    """
)
FAVOURITES: dict[str, list[str]] = {
    "colour": COLOURS,
    "color": COLOURS,
    "food": words(
        """
        pizza | pasta | rice | soup | bread | cheese | chocolate | sushi | salad | curry | pancakes |
        noodles | potatoes | tacos
        """
    ),
    "drink": words("tea | coffee | water | milk | lemonade | juice | cocoa | beer | wine | cola | cider"),
    "animal": words(
        "the fox | the owl | the whale | the tiger | the wolf | the bear | the eagle | the dolphin | the cat"
    ),
    "fruit": words(
        "apples | bananas | cherries | grapes | melons | pears | plums | mangoes | peaches | lemons | kiwis"
    ),
    "sport": words("football|tennis|chess|swimming|running|cycling|hockey|golf|rugby|basketball|rowing"),
    "season": words("spring | summer | autumn | winter"),
    "day": words("Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday"),
    "subject": words("maths | history | music | physics | art | biology | geography | chemistry"),
    "instrument": words("the piano | the guitar | the violin | the flute | the drums | the cello"),
    "flower": words("the rose | the tulip | the daisy | the lily | the orchid | the poppy"),
    "book": [],
    "film": [],
    "movie": [],
    "band": [],
    "song": [],
    "game": [],
    "singer": [],
    "author": [],
    "city": [],
    "place": [],
    "team": [],
}
# What is neither named nor a favourite ("My lucky number is 7."), and the kind of its value.
ATTRIBUTES: dict[str, str] = {
    "lucky number": "number",
    "phone number": "number",
    "room number": "number",
    "house number": "number",
    "code": "number",
    "password": "name",
    "secret word": "name",
    "nickname": "name",
    "surname": "name",
    "last name": "name",
    "home town": "name",
    "hometown": "name",
    "hobby": "hobby",
    "star sign": "sign",
    "birthday": "date",
}
HOBBIES = words(
    """
    painting | reading | gardening | cooking | fishing | knitting | dancing | singing | hiking | sailing |
    drawing | baking
    """
)
SIGNS = words(
    """
    Aries | Taurus | Gemini | Cancer | Leo | Virgo | Libra | Scorpio | Sagittarius | Capricorn | Aquarius |
    Pisces
    """
)
MONTHS = words(
    """
    January | February | March | April | May | June | July | August | September | October | November |
    December
    """
)
JOBS = words(
    """
    baker | teacher | nurse | doctor | farmer | pilot | painter | driver | cook | writer | singer | lawyer |
    plumber | gardener | dentist | carpenter | librarian | programmer | journalist | engineer | artist |
    actor | architect | electrician | waiter | tailor | sailor | fisherman | photographer | musician |
    scientist | designer | student | builder | firefighter | judge | butcher | florist
    """
)
CITIES = words(
    """
    London | Paris | Berlin | Rome | Madrid | Vienna | Oslo | Lisbon | Dublin | Prague | Athens | Tokyo |
    Sydney | Toronto | Boston | Chicago | Cairo | Delhi | Lima | Zurich | Munich | Hamburg | Amsterdam | New
    York | San Francisco | Barcelona | Mumbai | Seoul | Bern | Geneva
    """
)
REAL_NAMES = words(
    """
    Rex | Bella | Max | Luna | Charlie | Lucy | Cooper | Daisy | Buddy | Molly | Rocky | Bailey | Sadie |
    Duke | Tom | Anna | Peter | Mary | John | Paul | Emma | Olivia | Noah | Liam | Mia | Sophia | James |
    William | Benjamin | Lucas | Henry | Alexander | Mason | Michael | Ethan | Daniel | Jacob | Logan |
    Jackson | Levi | Sebastian | Mateo | Jack | Owen | Theodore | Aiden | Samuel | Joseph | David | Wyatt |
    Matthew | Luke | Carter | Julian | Grace | Chloe | Victoria | Riley | Aria | Lily | Nora | Zoe | Hannah
    | Stella | Leah | Hazel | Violet | Aurora | Whiskers | Fluffy | Mittens | Shadow | Ginger | Oscar |
    Felix | Simba | Nala | Coco | Milo | Tiger | Smokey | Pepper | Biscuit | Cookie | Patches | Snowball |
    Bubbles | Rover | Sarah | Laura | Julia | Maria | Eva | Lisa | Karin | Jonas | Felix | Hans | Fritz |
    Klaus | Ingrid | Sven | Olaf | Ahmed | Fatima | Ali | Omar | Yuki | Hiroshi | Kenji | Mei | Wei | Raj |
    Priya | Anil | Sunita | Carlos | Juan | Pedro | Lucia | Elena | Ivan | Olga | Boris | Natasha | Bob |
    Alice | Eve | Ben | Tim | Sam | Joe | Kim | Lee | Amy | Ian | Kate | Jane | Ruth | Rose | Fred | George
    | Frank | Harry | Sally | Susan | Karen | Linda | Betty | Bruno | Thunder | Lightning | Beauty | Speedy
    | Blue | Sunny | Lucky | Princess | Captain | Pirate | Pearl | Betsy | Herbie | Christine | Excalibur
    """
)
UNICODE_NAMES = words(
    """
    Zoë | José | Łukasz | Jürgen | Renée | Søren | Åsa | Çelik | Núria | Žofie | Ångström | Müller | Björn |
    Chloé | Señor | 小白 | ミケ | 花子 | Мурка | Барсик | Αθηνά | O'Neil | Anne-Marie | Mr. Fluff | R2D2 |
    K9 | 🐱 | Jean-Luc | Dr. Who | Schrödinger
    """
)
SYSTEM_PROMPTS = words(
    """
    You are a helpful assistant. | You are a friendly assistant. Answer briefly. | You are a kind assistant
    with a good memory. | Answer in one short sentence. | You are a small model. Be polite. | You remember
    everything that the user tells you. | You are a helpful, honest and friendly chat partner. Keep your
    answers short and clear. | You are kvcommons, a small demo model. | Be concise. | You help people. You
    are always polite. You do not make things up. If you do not know something, you say so.
    """
)
# What may follow a fact in the same message.
AFTERTHOUGHTS = words(
    """
    She is very sweet. | He is three years old. | I love it. | It is very old. | She likes fish. | I am
    proud. | He is my favourite. | We are happy. | She is three years old and she likes fish. | He lives
    near the sea. | Please do not forget it. | Remember that. | Is that not nice? | What do you think? |
    Nice, right? | I will ask you later. | He sleeps a lot. | It was a present.
    """
)
SUBJECTS = words(
    """
    The old man | A young woman | The teacher | My neighbour | The little girl | A tall boy | The farmer |
    The baker | Our friend | The doctor | A stranger | The children | The pilot | Somebody | The quiet
    student | The captain | The postman | A small bird | The brown horse | The king | The queen | The
    gardener | Her aunt | His cousin | The cook | The wind | The painter | The driver
    """
)
VERBS = words(
    """
    walked to | looked at | went past | waited near | found | remembered | talked about | painted | liked |
    forgot | wrote about | ran around | sat beside | returned to | dreamed of | drove to | asked about |
    cleaned | bought | sold | stood behind | left | visited
    """
)
OBJECTS = words(
    """
    the river | the old house | the market | a wooden table | the green hill | the station | a big tree |
    the garden | the sea | a red door | the bridge | the library | the museum | a small lake | the road |
    the kitchen | the tower | a quiet street | the mountain | the school | the window | a warm fire | the
    forest | the harbour | a long letter | the castle | the village
    """
)
TIMES = words(
    """
    in the morning | after lunch | before dinner | at night | on Sunday | in the rain | last week | every
    day | without a word | with a smile | for an hour | in winter | two days later | at noon | once more |
    very slowly | as always | in the evening
    """
)
PLACES = words(
    """
    park | beach | market | cinema | museum | library | zoo | office | gym | theatre | lake | forest |
    station | bakery | church
    """
)
FOODS = words(
    """
    apples | pancakes | soup | fresh bread | cheese | carrots | tomatoes | rice | cake | ice cream | grapes
    | noodles
    """
)
ACTIVITIES = words(
    """
    swim | read | cook | dance | sing | paint | run | travel | sleep | play chess | watch films | listen to
    music
    """
)

# What a user may say in passing, and what the assistant answers.
SMALL_TALK = _exchanges(
    """
    Hello. | Hello! | Hi. | Hi! | Hey! | Hi there! | Hello there. | Good day! | Hello | Hey there.
    => Hello! How can I help you?

    Good morning! | Good morning.
    => Good morning! How can I help you?

    Good evening! | Good evening.
    => Good evening! How can I help you?

    Good afternoon!
    => Good afternoon! How can I help you?

    How are you? | How are you today? | How are you doing? | How do you do? | How is it going? | What's up?
    | Hello, how are you? | Hi, how are you? | Are you well?
    => I am fine, thank you. How are you?

    I am fine. | I'm fine, thanks. | I am well, thank you. | I'm good. | Fine, thank you. | I am happy. | I
    feel great today. | I'm doing well.
    => I am glad to hear that.

    I am tired. | I'm very tired today. | I slept badly. | I am sleepy.
    => I hope that you can rest soon.

    I am sad. | I feel sad today. | I'm not well. | I had a bad day. | I am sick.
    => I am sorry to hear that. I hope that you feel better soon.

    I am hungry. | I'm hungry. | I have not eaten yet.
    => You could have something nice to eat.

    I am bored. | I'm so bored.
    => You could go for a walk or read a good book.

    Thank you. | Thanks! | Thank you very much. | Thanks a lot! | Many thanks. | thx | Thank you!
    => You are welcome!

    Goodbye. | Bye! | See you later. | Good night. | Bye bye. | See you tomorrow! | I have to go now.
    => Goodbye! It was nice to talk to you.

    Who are you? | What are you? | Tell me about yourself. | Are you a robot? | Are you a person? | Are you
    human? | What is your name? | What's your name? | Do you have a name? | Are you real?
    => I am a small language model. I remember what you tell me.

    What can you do? | How can you help me? | What do you do? | Can you help me? | Help! | Help me please. |
    What are you good at?
    => You can tell me facts and ask me about them later.

    Are you there? | Hello? Are you there? | Can you hear me? | Test. | Testing. | ping
    => Yes, I am here.

    Do you have a good memory? | Can you remember things? | Do you remember what I tell you? | Will you
    remember this? | Do you forget things?
    => Yes, I remember what you tell me in this conversation.

    Yes. | Yes! | Sure. | Of course. | Right. | Exactly. | yes please
    => Good.

    No. | No, thanks. | Not really. | Nope. | Never mind.
    => All right.

    Okay. | OK | Good. | Great! | Fine. | All right. | Cool! | Nice! | I see. | Perfect.
    => Is there anything else?

    Wow! | That is amazing. | Well done! | You are great. | Good job! | You are very clever. | Correct! |
    That is right. | I like you.
    => Thank you!

    That is wrong. | No, that is not right. | You are wrong.
    => I am sorry. Please tell me again.

    Sorry. | I am sorry. | Excuse me.
    => That is all right.

    What is the weather like? | How is the weather? | Will it rain today? | Is it cold outside? | It is
    raining. | The sun is shining. | It is very cold today. | It is snowing. | It is hot today.
    => I cannot see the weather, but I hope that it is nice.

    What time is it? | What day is it today? | What is the date?
    => I do not have a clock.

    Tell me a joke. | Do you know a joke? | Make me laugh. | Can you tell me a joke?
    => Why did the chicken cross the road? To get to the other side.

    Tell me a story. | Please tell me a story. | Can you tell me a story? | Tell me a short story.
    => Once upon a time a small bird lived in an old tree. Every morning it sang for the children of the
    village.

    Another story! | Tell me another story. | One more story, please.
    => A farmer lost his hat in the wind. A horse found it and carried it home.

    Tell me something. | Say something. | Tell me something interesting.
    => Bees can find their way home over a long distance.

    Do you like music? | Do you like books? | Do you like animals? | Do you like me? | Do you like cats? |
    Do you like dogs? | Do you like pizza?
    => Yes, I do. What about you?

    What do you like? | What is your favourite food? | What is your favourite colour? | What is your
    favorite color? | Where do you live? | How old are you? | Do you have a pet? | Do you have a family? |
    Who made you? | Do you have a cat?
    => I am only a small model, so I cannot say.

    What is two plus two? | What is the capital of France? | Who is the president? | How far is the moon? |
    Write a program. | Write some code for me. | Translate this into German. | Explain quantum physics. |
    What is the meaning of life? | Who won the match? | How do I bake a cake? | Why is the sky blue? | What
    is 12 times 7? | How many people live in China? | Solve this equation. | Write a poem. | What do you
    think about politics? | What is a computer? | How does a car work? | When was the war? | Who wrote that
    book? | What is love? | Can you write an email for me? | What is the news?
    => I do not know that. I am a very small model.

    Let us talk. | Let's talk. | Can we talk? | I want to talk. | I have a question. | May I ask you
    something? | Can I ask you a question? | I want to tell you something. | Listen.
    => Of course. Please go on.

    I have a lot to do. | I am busy. | I have to work today. | I have a meeting soon.
    => I wish you good luck with your work.

    I am going to bed. | It is late. | I will sleep now.
    => Good night! Sleep well.

    Today is my birthday. | I passed my exam! | I got a new job! | We won the game!
    => Congratulations!

    Hmm. | Hm | Well. | ... | ? | lol | haha | asdf | Let me think.
    => Please tell me more.

    What did I say? | What did you say? | Can you repeat that? | Pardon?
    => You can ask me about something that you told me.
    """
)
