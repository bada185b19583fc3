"""Text on which two models are compared: prose, numbers, code and other languages, some 900 tokens."""

TEXT = """\
The harbour office of Westhaven has kept a record of the tides since 1871. Every morning the keeper
walks to the end of the stone pier, reads the height of the water on a brass scale, and writes it
into a book with the hour, the wind and the weather. The first books are in ink that has turned
brown. In 1902 a clockwork gauge with a float and a roll of paper replaced the scale, and since 1987
a sensor has sent one number a minute to a computer in the cellar. Still, the keeper walks to the
pier. "A machine tells you how high the water is," she says, "but it does not tell you that the
seals have come back, or that the fog smells of smoke."

Tides follow the moon and the sun, and can be computed for centuries ahead. The moon passes over the
same place every 24 hours and 50 minutes, so that high water comes twice in that time, 12 hours and
25 minutes apart. When the sun and the moon pull in one line, at new and full moon, the difference
between high and low water is largest: 5.8 metres at Westhaven, against 3.1 metres a week later.
What cannot be computed is the wind. In the night of 31 January 1953 a storm from the north pushed
the water 2.4 metres above the predicted height, and the sea came over the wall at 3:17.

| year | highest water (m) | lowest water (m) | storms |
|------|-------------------|------------------|--------|
| 1951 | 6.02              | 0.21             | 3      |
| 1952 | 6.10              | 0.18             | 2      |
| 1953 | 8.37              | 0.20             | 6      |

The clerk's program, which has not changed much in thirty years, finds the hours at which the water
turns:

def turning_points(heights):
    \"\"\"Return the indices at which the water begins to fall or to rise.\"\"\"
    turns = []
    for i in range(1, len(heights) - 1):
        before, here, after = heights[i - 1], heights[i], heights[i + 1]
        if before < here >= after or before > here <= after:
            turns.append(i)
    return turns

Visitors leave notes in the book, too. "Wir haben drei Stunden lang zugesehen, wie das Wasser stieg;
am Ende waren unsere Schuhe naß." -- "Le soleil s'est levé à six heures, et la mer était déjà
haute." -- "Вода поднялась до третьей ступени." -- "月が出ると、潮が満ちる。" -- "潮水每天涨落两次。" -- "El faro se ve
desde la colina 🙂." One of them is signed by a girl of seven years, who wanted to know where the
water goes when it goes away. The keeper answered below it: to the other side, where another girl is
asking where it comes from.

If the level is h(t) = a + b*cos(2*pi*t/T), with a = 3.4 m, b = 2.3 m and T = 12.42 h, then the
water rises fastest halfway between low and high water, at 2*pi*b/T = 1.16 metres an hour. A child
who stands at the edge of the flat beach, where the ground rises one metre in eighty, must then walk
back 93 metres an hour, about one step every thirty seconds. Nobody drowns of that; but people sit
down to eat, and read, and forget. Therefore a bell rings from the office when the water has passed
the second step. It has rung 104,000 times, and it is still not loud enough for those who sleep in
the sun.
"""
