r"""What a line says behind its value: another value that it offers, which makes the answer a list, or a remark.

A line of a table is `gold <- answer | answer`, as in test_hostile_math.py; each stands behind `The answer is`, and so
that a box, marks and a last line are tried, in other forms.
"""

import pytest
from test_hostile_math import cases

from judges.math import grade

HEDGES = r"""
OR:: 5 <- 5 or 6 | 6 or 5 | either 5 or 6 | 5 (or 6) | 5, or 6 | 5, or maybe 6 | 5, possibly 6 | 5; perhaps 6
5 <- 5. Alternatively, 6 | 5, alternatively 6 | 5, or else 6 | 5 or, alternatively, 6 | 5, or about 6 | 5, if not 6
5 <- 5 - or 6 | 5. Or 6 | 5, or 6 dollars | 5, or six | 5 or $6$ | $5$ or $6$ | $5$ (or $6$) | \(5\) or \(6\) | 5 / 6
5 <- 5 if n is even, otherwise 6 | $5$, otherwise $6$ | 5, if n is even, 6 if n is odd | $5$ if n is even, else $6$
AND:: 5 <- 5 and 6 | 5, and also 6 | 5 and also 6 | $5$, $6$ | $5$ and $6$ | 5, 6 | 5; 6 | $5$; also $6$
5 <- 5 as well as 6
5 <- 5, as well as 6 | 5, plus 6 | 5 and maybe 6 | 5, and x = 6 works | 5, and, if n is odd, 6 | 5, and even 6
BUT:: 5 <- 5, but 6 works too | 5, however 6 works | 5, however, 6 works too | 5 but 6 is possible | 5, though 6 works
5 <- 5, though x = 6 works | 5, yet 6 is also right | 5, while 6 is acceptable | 5. But 6 is also possible
5 <- 5, although it may be 6 | 5, but it could also be $6$ | $5$, but $6$ works | $5$ but it might be $6$ | 5, but 6
5 <- 5, though some would say 6 | 5, but one could argue 6 | 5, and another solution is 6 | 5, with 6 also possible
5 <- 5, but 6 dollars works too | 5, although 6 satisfies it | 5 -- though 6 fits | 5, which is prime, and 6 works too
5 <- 5, unless n is odd, then 6 | 5, but 6 is not impossible | 5, though 6 isn't wrong | 5 (6 also works) | 5 (also 6)
5 <- not 5 but 6 | 5, because 2+3=5, but 6 works too | 5, since 2+3=5, although it could also be 6 | 6, not 5
5 <- 5, or 6 if n is odd | **5** or **6** | **5**, or **6** | **5**, but **6** works | **5** (or **6**)
FORMULAS:: x+1 <- x+1, or x-1 | $x+1$ or $x-1$ | $x+1$, though $x-1$ works | x+1, but x+2 also works | $x+1$, $x-1$
\frac{1}{2} <- \frac{1}{2}, or \frac{1}{3} | $\frac12$ or $\frac13$ | 1/2, though 1/3 is possible | 0.5, maybe 0.6
\sqrt{2} <- \sqrt{2}, but also -\sqrt{2} | $\sqrt2$, and also $-\sqrt2$ | (1,2) <- (1,2), or (2,1) | $(1,2)$ and $(2,1)$
OPTIONS:: B <- B or C | B, or C | B, but C is close | B, but C is also right | B (or C) | B, though C works | B. Or C
B <- B and C
B <- B, maybe C | (B), but (C) is also right | B, however C fits too | option B, but option C is also right | B/C
B <- B; C is also right | **B**, though **C** is possible | B, and also C | B. But C could also be right
WORDS:: yes <- yes, or no | yes or no | Alice <- Alice or Bob | Alice, or Bob | Alice, maybe Bob | even <- even, or odd
"""
REMARKS = r"""
REASONS:: 5 <- 5, because 2+3=5 | 5 because 2+3=5 | 5, since 2+3=5 | 5 (since 2+3=5) | 5, as 2+3=5 | 5 as 10/2=5
5 <- 5, which is prime | 5, so 6 is too many | 5, where x > 0 | 5, that is, 5.0 | 5, i.e. 10/2 | 5, since 6 is even
5 <- 5, since x = 2 or x = 3 and 2+3=5 | 5, because 2 is prime, 3 is prime, and 2+3=5 | 5, which is 2 more than 3
5 <- 5 since 2 is prime but 4 is not | $5$, since $2+3=5$ | $5$ because $6$ is too large | $5$, where $x=2$
5 <- \(5\), so $x=6$
5 <- 5, so we are done | 5, and we are done | 5 and we are done | 5; this follows from 2+3
5 <- 5, by the formula with n = 4
5 <- 5, if we count 0 | 5, given that x = 2 | 5, for x = 2 | 5, using 2+3 | 5, found by adding 2 and 3 | 5, with x = 2
5 <- 5, as required. | 5, as 6 is even and 4 is even | 5 (from 2 + 3) | 5 (see step 2) | 5. We check: 2+3=5.
5 <- 5. Check: 10-5=5
RESTATED:: 1/2 <- 1/2, that is, 0.5 | 1/2, or 0.5 | 1/2 or 0.5 | 1/2, i.e. 0.5 | 1/2, or equivalently 0.5
1/2 <- $\frac12$ or $0.5$
1/2 <- $\frac{1}{2}$, i.e. $0.5$ | 1/2 (or 0.5) | 1/2 = 0.5 | 0.5, which is 1/2 | 1/2 (that is, 0.5) | 0.5, or 50\%
\pi <- $\pi$, or about 3.14 | $\pi$ (about 3.14) | $\pi$, or approximately $3.14$ | $\pi$, which is about 3.14
2\sqrt{2} <- $2\sqrt2$, or $\sqrt8$ | $\sqrt{8}$, which is $2\sqrt{2}$ | $2\sqrt{2}$, or roughly 2.83
STORY:: 18 <- 18, but she has 3 left over | 18 dollars, while Bob has 12 dollars | 18, though this took a while
18 <- 18, leaving 3 apples | 18, and she has 3 left | 18, but note that 18 = 15 + 3 | 18, though 3 of them are broken
18 <- 18 dollars, and Bob has 12 dollars | 18, and 18 is even | $18$, giving a total of $36$
18 <- 18 eggs, although 3 were eaten
18 <- $18, which is $5 more than Bob | $18 and she keeps $5 | \$18, because \$9 + \$9 = \$18 | $18$ dollars
18 <- $18$ for 3 days
18 <- 18 miles, while the other path is 20 miles long | 18, with 3 left over | 18, where 3 are red and 15 are blue
NOT:: 5 <- 5, not 6 | 5 and not 6 | 5, but not 6 | 5, rather than 6 | 5, though 6 does not work
5 <- 5, but -2 is extraneous
5 <- 5, but x = -1 is rejected | 5, while 6 is too large | $5$, but note $x=6$ is extraneous
B <- B, since A and C are wrong | B, while A, C and D are wrong | B, not C | B, which is 5 | B because C is even
B <- B, as C is 6
B <- (B) because 2+3=5 | B. C is wrong | B, but C is not | B: 12 | option B, since option C is odd
BOLD:: 18 <- **18**, as required. | **18**, which is even | **18** dollars | **$18$**, which is even
18 <- **18 dollars**. | **18**
18 <- **18** because 9+9=18 | **$18**, so we are done | **18**; done | **18** (eighteen) | *18*, as said
18 <- 9 + 9 = **18**, as required | **\$18**, since 9+9=18 | **x = 18**, as required | $\mathbf{18}$, as required
18 <- __18__, so
B <- **B**, since C is odd | **(B)**, as required | **B.** C is odd | 3:45 PM <- **3:45 PM**, as required
3:45 PM <- 3:45 p.m., so
LISTS:: 5, 6 <- 5 and 6 | $5$ and $6$ | $5$, $6$ | $5$ or $6$ | either 5 or 6 | both 5 and 6 | 5 or 6, which differ
5, 6 <- **5** and **6**
5, 6 <- $x = 5$ and $x = 6$ | x = 5 or x = 6, as required | $x=5$, $x=6$ | 5, and also 6 | 1,234 <- 1,234, as required
3k+1 <- $3k+1$, where $k$ is an integer | $3k+1$, $k \in \mathbb{Z}$ | 3k+1, where k is 0, 1 or 2 | $3k+1$ for $k \ge 1$
(1,2) <- $(1,2)$, since $1+2=3$ | (1,2), which lies on y = 2x | x=3, y=5 <- $x=3$ and $y=5$
x=3, y=5 <- x = 3 and y = 5, as required
"""
BOXES = [  # what stands around the last box
    ("5", r"\boxed{5} or 6", "wrong"),
    ("5", r"$\boxed{5}$ or $6$.", "wrong"),
    ("5", r"$\boxed{5}$ (or $6$)", "wrong"),
    ("5", r"\boxed{5}, and also 6", "wrong"),
    ("5", r"\boxed{5}, but 6 works too", "wrong"),
    ("5", r"$\boxed{5}$, though it could also be $6$.", "wrong"),
    ("B", r"\boxed{B}, but C is also right", "wrong"),
    ("5", r"6 or \boxed{5}", "wrong"),
    ("5", r"So it is $6$, or $\boxed{5}$.", "wrong"),
    ("5", r"\boxed{5}\text{ or }6", "wrong"),
    ("5", r"\boxed{5}, since 2+3=5", "ok"),
    ("5", r"so \boxed{5} because 6 is too large", "ok"),
    ("5", r"$x = \boxed{5}$ and we check $2+3=5$", "ok"),
    ("5", r"so $a=\boxed{5}$ and $b=3$", "ok"),
    ("5", r"\boxed{5} dollars, and she has 3 left", "ok"),
    ("5", r"\boxed{5} and not 6", "ok"),
    ("1/2", r"\boxed{\frac12}, or 0.5", "ok"),
    ("5", r"for $n = 2$ or $n = 3$: \boxed{5}", "ok"),
    ("5", r"\boxed{5}. We are done: 6 is even.", "ok"),
    ("5", "\\boxed{7}\nThe answer is **5**, as required.", "ok"),
    ("5", "\\boxed{7}\nThe answer is **5**, but 6 works too.", "wrong"),
    ("5", "\\boxed{5}\nThe answer is 5 or 6.", "wrong"),
    ("5", "The answer is 5 or the answer is 6.", "wrong"),
    ("6", "The answer is 5 or the answer is 6.", "wrong"),
    ("6", "The answer is 5. No, the answer is 6.", "ok"),
]


def outcome_of(gold, reply):
    return grade({"answer": gold, "reply": reply, "strict": False})["outcome"]


def test_another_value_that_is_offered_makes_a_list():
    assert [pair for pair in cases(HEDGES) if outcome_of(pair[0], f"The answer is {pair[1]}") == "ok"] == []


def test_a_remark_behind_the_value_is_none():
    assert [pair for pair in cases(REMARKS) if outcome_of(pair[0], f"The answer is {pair[1]}") != "ok"] == []


@pytest.mark.parametrize(("gold", "reply", "outcome"), BOXES)
def test_around_a_box(gold, reply, outcome):
    assert outcome_of(gold, reply) == outcome
