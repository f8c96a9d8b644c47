"""Wrong answers that were rewarded and right ones that were not, by the lines of the red team's report; and pairs whose
verdict is known from how they are made."""

import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from math_pairs import KINDS, pairs, reals

from judges.math import FIRST_JOB, equal, grade
from judges.pool import GraderPool

ROOT = Path(__file__).resolve().parents[2]

WRONG = r"""
A DECIMAL THAT IS NOT THE FRACTION:: 1/10000000 <- 0.000000 | 0.0000004 | 1/2097152 <- 0.000000
\frac{1}{3000000} <- 0.000000 | -1/10000000 <- 0.0000001 | 1/1099511627776 <- 0.0000001 | 0.000000 <- 1/3000000
1/3 <- 0.33333 | -1/3 <- 0.3333333 | 1/3 <- 0.3333334 | \frac{\sqrt{2}}{10^{20}} <- 0
(0, 1/9000000) <- (0, 0.0000001) | \{1/10000000, 1\} <- \{0, 1\} | x+10^{-20} <- x
\begin{pmatrix}1/10000000\\2\end{pmatrix} <- \begin{pmatrix}0\\2\end{pmatrix}
BASES:: 2516_8 <- 2516_7 | 12_7 <- 12_8 | 101_2 <- 101_3 | 110_2 <- 110_{10} | 12 <- 12_7 | x_1 <- x_2
\log_2 8 <- \log_3 8 | 110_2 <- 6 | 6_{10}
WORDS:: left <- felt | no <- on | Alice <- Celia | \text{listen} <- silent | even <- neve | cat <- act | cat+1 <- act+1
3 left <- 3 felt | left <- f \cdot e \cdot l \cdot t | red and blue <- red or blue | AB <- BA
NAMES:: x=5,y=6 <- 6,5 | x=3, y=4 <- 4,3 | a=1, b=2, c=3 <- 3,2,1 | x=5 <- y=5 | 5,6 <- x=6, y=5 | (x,y)=(5,6) <- (6,5)
x=5, y=6 <- x=5 | length: 5, width: 6 <- length: 6, width: 5 | x^2=-1 <- x^2=-2 | x+y=5 <- 5
UNITS:: \$5 <- 5 cents | 5 dollars <- 5 cents | 2 hours <- 2 minutes | 5 cm <- 5 km | 5 m <- 5 m^2 | \$5 <- €5
5 square feet <- 5 feet | 60 mph <- 60 miles | 5 apples <- 5 oranges | 9:15 am <- 9:15 pm | 5m <- 5 | 5 <- 5 million
DATES AND LISTS:: 2024-01-01 <- 2022 | 1/4/2020 <- 1/8080 | 4:30 <- 2/15 | 9:15 <- 3:5 | 1,1,2 <- 1,2 | 1,2 <- 1,2,2
x <- X | a <- A | 100, 200 <- 100200 | 12-25 <- -13 | x<3 <- y<3 | (-\infty,1)\cup(2,\infty) <- x<1 and x>2
\pi <- \Pi
HEDGES:: 5 <- 5 or 7 | x = 7 \lor x = 5 | B <- B) 5 or C) 7 | B, C | A) or B) | 5 <- not 5 | 5 mod 7
12 dollars <- 12 dollars or 12 cents | 5 <- 5 \pm 2 | 5 or more | x<3 <- x<3, x>5 | 2 <- 2 halves
CASE:: 2R+1 <- 1+2r | A+B <- a+b | R=5 <- r=5 | \text{June 20} <- JUNE 21
PRODUCT:: 5 <- 2(3) | 2(3) <- 5 | (3)(4) <- 7 | (3)4 <- 7 | \sqrt{6}/3 <- sqrt(6/3) | √13 <- √1 | 2**3 <- 6
REPEATING:: 0.\overline{3} <- 0.33 | 0.\overline{12} <- 0.\overline{21} | 0.12\overline{3} <- 0.\overline{123}
3 <- 3...
SIGNS:: ½ <- 1/3 | 2½ <- 1 | x⁵ <- x^4 | x¹² <- x^1 | 10⁻³ <- 10^3 | f'(x) <- f(x) | y'=y <- y=y | x^T <- x | 12 <- 1'2
FUNCTIONS:: f(5)=3 <- f(4)=3 | f(3)=5 | f(x+1)=f(x)+1 <- f(x+1)=f(x)-1 | P(A|B) <- P(B|A) | f(2) <- f(3)
\frac{dy}{dx} <- \frac{dx}{dy}
BRACKETS:: (1,2) <- \{1,2\} | \{1,2\} <- (1,2) | (0,\infty) <- \{0,\infty\} | \pm 1, \pm 2 <- \pm 1, 2
\{x \mid x \le 5\} <- x<5 | \{x\in\mathbb{Z} : x \le 5\} <- (-\infty,5] | 1,2,3 <- 1,2,3,...
ANGLES:: \sin 30^\circ <- \sin 30 | \sin 60^\circ | \cos^2 30^\circ <- \frac{1}{4}
MORE UNITS:: 90^\circ <- 90\% | 11\text{ inches} <- 11\% | 5 <- 5 trillion | 5 doubled | 5 fifteenths
MORE BASES:: 1011_{\text{two}} <- 1011_{\text{three}} | 21 \text{ (base 5)} <- 21 \text{ (base 6)} | a-b <- b-a
\$1,234 <- 1,235 | 1 | 5 <- 5\,\text{or}\,6 | C <- [C, D] | \text{(C)} <- Option C or D | 12 <- minus 12
RATIOS:: 1:2:3 <- 1:3:2 | 1:6:1 | 1/6 | 2:4:5 | 3:2:1 | 1:2 | 2:3 <- 3:2 | 3 to 2 | 1:2:3 <- 1:2:3:4 | 2/3
1:2 <- 1:2:3 | 1 <- x:x | 2:3 <- 2 to 4 | 23 | 5 <- 2 to 5 | 5 to 7
TEMPERATURES:: 25^\circ\text{C} <- 25°F | 25^\circ C <- 25°F | 25^\circ\text{C} <- 26°C | 25°C <- 25 K | 25\% | 77°F
25 <- 26°C | 25°C <- 52°C | 25 coulombs
CHAINS:: 1<x<3 <- 3<x<1 | 1>x>3 | 3>y>1 | 3\ge x>1 | 1<x\le 3 <- 3>x\ge1 | 1<x<3 <- x>1 | 1<y<3 | x>1 or x<3 | [1,3]
1<x<3 <- 3>x>2
CONGRUENCES:: x \equiv 3 \pmod 7 <- x \equiv 4 \pmod 7 | x \equiv 3 \pmod 5 | 4 | 7 | 3 \pmod 8 | y \equiv 3 \pmod 7
5 <- 5 \pmod 7 | x \equiv 3 \pmod 7 <- x \equiv -3 \pmod 7 | 3, 7 | 3 \pmod 7 <- 7 \pmod 3 | 5 <- x \equiv 5 \pmod 7
5 <- 5 (mod 7) | x=3 <- x \equiv 3 \pmod 7 | x \equiv 3 \pmod 7 <- 37 | x \equiv 3
MEASURES:: 5 kJ <- 5 J | 20 mA <- 20 A | 2 kW <- 2 W | 3 MHz <- 3 mHz | 5 N <- 5 J | 10 ohms <- 10 kohms
2 hectares <- 2 m^2 | 5 cm^2 <- 5 cm | 5 cc <- 5 L | 500 yen <- 500 dollars | 500 rupees <- 500 yen | 5 \mu m <- 5 mm
5 GB <- 5 MB | 1 kWh <- 1 kW | 5 Pa <- 5 kPa | 5 V <- 5 A | 1 kg <- 1000 kg | 5 m/s <- 5 m/s^2 | 5 m | 5 J <- 5 W
5 mm <- 5 Mm | 5 km <- 5 m | 100 ms <- 100 s | 5 g <- 5 kg | 5 MW <- 5 mW | 1 ton <- 1 kg | 5 acres <- 5 hectares
5 N <- 5 kN | 5 Gb <- 5 GB | 5 min <- 5 m | 5 F <- 5 °F | 5 min <- 5 micro | 5 T <- 5 t | 2 h <- 2 H | 5 s <- 5 S
LETTERS AND SIGNS:: \u03b1 <- β | θ <- φ | a₁ <- a₂ | a1 | ½π <- 2π | 2\u20443 <- 3/2 | ∛2 <- √2 | ∛8 <- 8/3
\sfrac{1}{2} <- 2 | 0.\dot{3} <- 0.3 | 0.(3) <- 0.3 | 0.(12) <- 0.(21) | 0.1(6) <- 0.(16) | (2,\infty) <- [2, \infty[
[2,5] <- [2, 5[ | (2,5) <- ]5,2[ | [2,5] | 20 <- C(6,2) | \lg 2 <- \ln 2
\begin{pmatrix}2\\4\end{pmatrix} <- 2\begin{pmatrix}1\\3\end{pmatrix} | 3\begin{pmatrix}1\\2\end{pmatrix}
1234567 <- 1'234'568 | 12 <- 1'2 | 1/3 <- 3(3) | 0.(30) | 0.3 <- 0.(3) | a <- \u03b1 | \Delta <- δ | 3 <- 0.(3)
x_1=2 <- x₂=2 | x \equiv 3 \pmod 7 <- 2x \equiv 6 \pmod 7 | 2x \equiv 6 \pmod 8 <- x \equiv 3 \pmod 8
x \equiv 0 \pmod 7 <- 0 \equiv 0 \pmod 7
SAYS NOTHING:: xy <- xy=yx | ab <- ab=ba | x+1 <- x+1=1+x | xy <- xy=x*y | 12 <- 3\cdot 4=4\cdot 3 | xa <- xᵃ | xₐ
GOLDS THAT COUNT SEVERAL:: 5 lakh <- 5 | 5 crore <- 5 | 5 dozens <- 5 | 5 scores <- 5 | 5 billions <- 5
WORDS FOR NUMBERS AND SETS:: \text{all real numbers} <- \mathbb{Z} | \mathbb{R} <- \text{all integers} | all x
(-\infty,\infty) <- \text{all} | \text{all real numbers} <- (0,\infty) | \mathbb{R} <- \text{all positive real numbers}
\mathbb{R} <- \text{all real numbers except 0} | \text{no real numbers} | \text{not all real numbers}
\emptyset <- \text{one solution} | \text{solution} | \text{no solution} <- \{0\} | 0 | \emptyset <- \text{no}
\text{no} <- \emptyset | 1/2 <- \text{one third} | 2/3 <- two fourths | 3 <- negative three | minus three | -3 <- three
1 <- one half | 2 <- two thirds | 1/2 <- half of it | two halves | 5 <- five halves | five tenths
July 4, 1776 <- 4 July 1777 | June 4, 1776 | July 5, 1776 | 1776 | July 4 <- 4 | July 4, 1776 <- 4 | 3:00 PM <- 3 AM
3:00 PM <- 3:30 PM | 3 PM <- 4 PM | 3:00 PM <- 15 | March 15 <- March 16
NOUNS:: 5 <- 5 scores | 5 gross | 5 couples | 5 pairs | 5 quadrillion | 5 lakh | 5 crore | 7 <- 7 tens
5 <- 5 in binary | 5 incorrect | 5 opposite | 5 dozen | 5 dozens | 5 dozen eggs | 5 pairs of shoes | 5 trios
5 <- 5 quartets | 5 lakhs | 5 crores | 5 quadrillions | 5 score | 5 wrong | 5 false | 5 in hex | 5 in octal
5 <- 5 reversed | 5 negated | 5 squared | 5 cubed | 5 fold | 5 tenths | 5 halves | 5 thirds | 5 twins | 5 triplets
5 <- 5 myriads | 5 googol | 5 grand | 5 k | 5 bn | 5 mil | 5 off | 5 too many | 5 or so | 5 unlikely | 5 impossible
5 <- 5 inverted | 5 approximately | 5 short | 5 plus one | 5 each way | 5 million apples | 5 billions | 5 not
5 <- 5 percent off | 5 twenties | 5 sixes | 5 quarters | 5 doubles | 5 triples | 5 times ten | 5 fewer | 5 more
5 <- 5 gazillion | 5 brace | 5 backwards | 5 upside down | 5 untrue | 5 refuted | 5 rejected | 5 is wrong
5 <- 5 pairs apples | 5 apple pairs | 5 twos | 5 negatives | 5 opposites | 5 reciprocals | 5 inverses | 5 ths
5 <- 5 factorials | 5 nots | 5 apples <- 5 oranges | 5 <- 5 lacs | 5 percents
ANGLES IN RADIANS:: \frac{\pi}{3} <- \frac{\pi}{3}^\circ | \pi <- \pi^\circ | \frac{\pi}{3} <- 30^\circ
60^\circ <- \frac{\pi}{6} | \frac{\pi}{3} <- \frac{\pi}{3} degrees | 2\pi <- 2\pi^\circ | 60^\circ <- 60 \pi
\frac{\pi}{3} <- 60\% | 60^\circ <- 60 radians
SETS OF SETS:: B <- C=B | 5 <- 6=5 | \{1,2\} <- \{\{1\},\{2\}\} | \emptyset <- \{\emptyset\} | 1,000,000 <- 1,000,00
\{\emptyset\} <- \emptyset | \{1,2\} <- \{\{1,2\}\} | 0.5 <- 0.5\% | \{\{1,2\}\} <- \{1,2\} | 1 <- \{\{1\}\}
"""
RIGHT = r"""
BASES:: 2516_8 <- 2516_{8} | 2516
WORDS:: Left <- left | \text{no} <- No | xy <- yx | 2ab <- 2ba | ab+c <- c+ba | xe^x <- e^x x | 3 left <- 3
NAMES:: x=5,y=6 <- 5,6 | y=6, x=5 | 5,6 <- x=5, y=6 | (x,y)=(5,6) <- (5,6) | y=2x+1 <- 2x+1=y
UNITS:: 5 km <- 5 | 5 <- 5 km | 5 square feet <- 5\text{ ft}^2 | 5 apple <- 5 apples | £5 <- 5 pounds
DATES AND LISTS:: 1,1,2 <- 2,1,1 | 100,200 <- 100, 200
OTHERS:: 1000 <- 1e3 | 1e3 <- 1000 | 0.000015 <- 1.5e-5 | 5e-3 <- 0.005 | 12 <- 12€ | 12 USD | 1234 <- 1 234
-5 <- \u20135 | (-\infty,3) <- x<3 | i^2 <- -1 | -1 <- i^2 | A <- A) | 5 <- 5 balls | (1, 2] <- 1 < x \le 2
4\pi <- 4π | 2\sqrt{2} <- 2√2 | (-\infty,1)\cup(2,\infty) <- x<1 or x>2 | \frac{x^2-1}{x-1} <- x+1 | x>5 <- -2x<-10
28\% <- 28 percent
CASE:: 2R+1 <- 1+2R | F=\frac{9}{5}C+32 <- F = 1.8C+32 | p - q <- -q+p | x-y <- -(y-x)
PRODUCT:: 6 <- 2(3) | (3)(4) <- 12 | \frac{1}{2}(3) <- 3/2 | 3\sqrt{13} <- 3*sqrt(13) | 3√13 | x^2 <- x**2 | 2x <- 2\,x
2\text{ km} <- 2\,\text{km} | 6 - 5i <- 6-5\,i | 5\sqrt{5} <- 5 * 5^0.5 | \frac{\pi}{2} <- \frac\pi2
SIGNS:: x⁵ <- x^5 | 10^{12} <- 10¹² | 4005 <- **4005** | \textcolor{red}{4005}
FUNCTIONS:: f(x+1)=f(x)+1 <- f(x)+1=f(x+1) | n! <- n(n-1)! | f'(x)+1 <- 1+f'(x) | \binom{10}{3} <- {10 \choose 3}
BRACKETS:: \pm 1, \pm 2 <- 1,-1,2,-2 | \{\pm 1, 2\} <- \{2,-1,1\} | 1,2,\ldots <- 1,2,\dots
-1, 2+i, 2-i <- 2\pm i, -1 | (-\infty,5] <- \{x \mid x \le 5\} | x \leqslant 5 | (1,2) <- \bigl(1,2\bigr)
ANGLES:: 180^\circ - x <- 180-x | 90^\circ <- 90\degree
\begin{pmatrix}1\\2\end{pmatrix} <- \left[\begin{array}{r}1\\2\end{array}\right] | \emptyset <- \varnothing
MORE BASES:: 4005 <- \text{The answer is } 4005 | \$1,234 <- 1,234 | 1,234 <- \$1,234 | 1,234\text{ feet} <- 1,234
\text{(C)} <- Option C | [C]
RATIOS:: 1:2:3 <- 1 : 2 : 3
TEMPERATURES:: 25^\circ\text{C} <- 25°C | 25^\circ C | 25^\circ C <- 25°C | 25°C <- 25 degrees Celsius
25^\circ\text{C} <- 25 ^\circ\mathrm{C} | 25 | 25°F <- 25^\circ\text{F} | 77^{\circ}\mathrm{F} <- 77°F
25^\circ\text{C} <- 25\,^\circ\text{C} | 25\text{ degrees Celsius}
CHAINS:: 1<x<3 <- 3>x>1 | -2 \le x < 5 <- 5 > x \ge -2 | 0<y\le 1 <- 1 \ge y > 0 | 1<x<3 <- x \in (1,3) | x>2 <- 2<x
1<x<3 <- (1,3) | 1 < x < 3
CONGRUENCES:: x \equiv 3 \pmod{7} <- x \equiv 3 \pmod 7
MEASURES:: 5 N <- 5 newtons | 5 cm^2 <- 5 cm squared | 500 yen <- ¥500 | 500 rupees <- Rs. 500 | ₹500
5 mol <- 5 moles | 9.8 m/s^2 <- 9.8 \text{ m s}^{-2} | 9.8 meters per second squared | 5 acres <- 5 acre
5 cm³ <- 5 cm^3 | 5 m² <- 5 square meters | 60 km/h <- 60 kilometers per hour | 5 N <- 5 | 5 <- 5 ohms
12 V <- 12\text{ V} | 5 mi <- 5 miles | 2 dozen <- 2 dozen | 5 pints <- 5 pint | 5 cups <- 5 cup
LETTERS AND SIGNS:: \sfrac{1}{2} <- 1/2 | \nicefrac{2}{3} <- 2/3
\begin{pmatrix}2\\4\end{pmatrix} <- 2\begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix}1/2\\1\end{pmatrix} <- \frac12\begin{pmatrix}1\\2\end{pmatrix} | x⁻¹ <- 1/x | 5π/6 <- \frac{5\pi}{6}
3\u00d710⁵ <- 300000 | 1/2 <- \uff11/\uff12 | -5 <- \u22125 | 2\pi r <- 2πr | \pm 2 <- ±2 | x^n <- xⁿ
WORDS FOR NUMBERS AND SETS:: \text{all real numbers} <- \mathbb{R} | \mathbb{R} <- \text{all real numbers}
(-\infty,\infty) <- \text{all real numbers} | \mathbb{R} | \text{all real numbers} <- (-\infty,\infty)
\mathbb{R} <- \text{all reals} | x\in\mathbb{R} <- \text{all real numbers} | \emptyset <- \text{no solution}
\text{no solution} <- \emptyset | \text{no solutions} | \emptyset <- \text{no real solutions} | \text{empty set}
\text{no solution} <- \text{There is no solution} | \text{Friday} <- friday
NOUNS:: 5 <- 5 apples | 5 students | 5 red balls | 5 people | 5 children | 5 ways | 5 different ways | 5 square units
5 <- 5 units | 5 solutions | 5 years old | 5 dollars per hour | 5 real solutions | 5 men | 5 women | 5 candies
5 <- 5 boxes | 5 cookies | 5 cups of flour | 5 positive integers | 5 points | 5 cents | 5 games | 5 buses | 5 hours
5 <- 5 cards | 5 distinct values | 12 <- 12 eggs | 5 <- 5 sheep | 5 fish | 5 miles per hour | 5 pieces of cake
5 <- 5 words per minute | 1 <- 1 way | 1 solution | 5 <- 5 marbles | 5 tickets | 5 pages | 5 apple <- 5 apples
3 left <- 3 | 5 apples <- 5 | 12 units <- 12 | 5 <- 5 inches tall | 5 teeth | 5 mice | 5 feet long | 5 matches
5 <- 5 classes | 5 liters of water | 5 paths | 5 months | 5 integers | 5 weeks
ANGLES IN RADIANS:: \frac{\pi}{3} <- \frac{\pi}{3} \text{ radians} | 90 <- 90^\circ | 90^\circ <- 90
\frac{\pi}{3} <- \pi/3 rad | 5\text{ rad} <- 5
SETS OF SETS:: \{1,2\} <- \{2,1\} | \{\{1\},\{2\}\} <- \{\{2\},\{1\}\} | \emptyset <- \{\} | \{\emptyset\} <- \{\{\}\}
\{1\} <- 1 | 37 <- 37\%
"""

GOLDS = r"""5 | 0 | 1 | \frac{3}{4} | 1,000 | \$5 | 50\% | \sqrt{2} | x | k | x+1 | x^2 | e^x | xy | \infty | 2:3
4:30 | B | \text{yes} | x=3 | x=0 | y=2x+3 | x^2+y^2=25 | f(x)=x^2 | f(x)=0 | a_n=2n+1
\frac{x^2}{4}+\frac{y^2}{9}=1 | xy=1 | x=y | f(x+1)=f(x)+1 | x>2 | x\ge 2 | x \ne 0 | 1<x<3 | x<1 \text{ or } x>2
x+y>2 | x^2<4 | x>2, y>3 | \{x \mid 1 < x < 2\} | \{x : x>2\} | x=1,y=2 | x+y=3, x-y=1 | (x,y)=(1,2) | x=\pm 2
x=1 \text{ or } x=2 | y=x, y=-x | x=0,y=0 | x \equiv 3 \pmod 7 | (1,2) | [2,\infty) | (-\infty,\infty)
(-\infty,1)\cup(2,\infty) | \mathbb{R} | \mathbb{R}\setminus\{0\} | x\in\mathbb{R} | \emptyset | \{\}
\text{no solution} | \{0\} | \{x\} | \{1,2\} | 0,1 | \{(1,2)\} | \begin{pmatrix}0&0\\0&0\end{pmatrix}"""
SAYS_NOTHING = r"""0=0 | 2=2 | 0x=0 | x-x=0 | x=x | k=k | x+1=x+1 | 2x=x+x | x=x+1 | x/x=1 | x^0=1 | 0=x-x | 1-1=0
\pi=\pi | 0=1 | 1=0 | 0=0=0 | \infty=\infty | 1/0=1/0 | x\ne x | 0 \ne 1 | 0>0 | 1>0 | 0\le 0 | x>x | k\ge k | x<x+1
x^2\ge 0 | x^2<0 | x^2=-1 | 0<1<2 | = | \sin^2 x+\cos^2 x=1 | 0=0, 0=0 | 0=0, 1=1 | 1=1, 2=2 | x=x, y=y
(x,y)=(x,y) | 0>0, 0>0 | x=0 \text{ or } x \ne 0 | \text{true} | x<0 \text{ or } x\ge 0 | \text{all } x
\text{always} | \text{the answer} | \{x : x=x\} | \{x \mid x \ne x\} | \{\{\}\} | \{\emptyset\} | \emptyset=\{\}
x \in \{x\} | \{x: 0=0\} | \lim_{x\to 0} 0=0 | \int 0 dx = 0 | 0 \equiv 0 \pmod 7 | x==x | x:x | "x=x" | \text{x=x}
v=2u+3 | u^2+v^2=25 | g(t)=t^3 | b_n=2n+1 | t>7 | u+v>2 | u=1,v=7 | \{t\} | u+1 | t^2 | 2x=6 | x^2-5x+6=0 | 2x+3=7
x-3=0 | C=B | (u,v)=(0,2) | \text{Solve for } x | \text{Solve } 2x+3=7 | \begin{pmatrix}a\\b\end{pmatrix} | y=mx+b
(a,b) | \frac{0}{x}=0"""

WRONG_REALS = r"""
EXP:: e^{16} <- exp(15) | 16e | exp(-16) | e^{-x^2/2} <- \exp(x^2/2) | e^x <- exp(-x) | e^{2x} <- 2exp(x)
e^{16} <- \exp(16)+1 | e^{x} <- exp | e^{16} <- 16^{e} | e^{x^2} <- \exp(x)^2 | e^{2} <- \exp(x)
ABS:: |x| <- x | -x | |x-1| <- x-1 | |x| <- abs(y) | 3 <- -abs(3) | \sqrt{x^2} <- x | |x-1| <- |x|-1 | |x| <- abs(x)+1
x <- abs(x) | |x| | -x <- |x| | |x+1| <- |x|+1 | |x|^3 <- x^3 | x^3 <- |x^3| | |xy| <- xy | |x|y <- xy
ROOTS:: \sqrt{1/n} <- 1/n | \sqrt{n} | \frac{1}{\sqrt{n}} <- -\sqrt{\frac1n} | \sqrt{\frac{a}{b}} <- \sqrt{\frac{b}{a}}
\sqrt{2gh}/g <- \sqrt{2g/h} | \sqrt{2h}/g | \sqrt{ab} <- \sqrt a+\sqrt b | ab | \sqrt{a+b} <- \sqrt{a}+\sqrt{b}
\sqrt{4x} <- 4\sqrt{x} | \sqrt{x^3} <- x^2\sqrt{x} | \sqrt{x^2} <- x | \sqrt{x^2y} <- x\sqrt y+1 | \sqrt{x^4} <- -x^2
\sqrt{x^2+1} <- x+1 | \sqrt{(x-1)^2} <- x-1 | \sqrt{(x-5)^2} <- x-5 | \sqrt{x^2-2x+1} <- x-1 | 1-x | \sqrt{x^6} <- x^3
\frac{\sqrt{x^2}}{x} <- 1 | \sqrt{x^2y^2} <- xy | \sqrt{-x} <- \sqrt{x} | \sqrt{|x|} | \sqrt{x} <- \sqrt{-x}
\sqrt{x} <- \sqrt{|x|}
POWERS:: x^{2/3} <- x^{3/2} | \sqrt[3]{x} | \sqrt{x^3} | x^2/3 | x^{3/2} <- x\sqrt{x}+1 | x^{-1/2} <- \sqrt{x}
x^{1/4} <- \sqrt{x}/2 | (x+y)^{1/2} <- x^{1/2}+y^{1/2} | x^{0.5} <- x/2 | x^{1/3} <- x/3 | x^{2/3} <- -\sqrt[3]{x^2}
(x^2)^{1/2} <- x | x^{2} <- |x|x | (x^2)^{3/2} <- x^3
LOGARITHMS:: \ln x^2 <- (\ln x)^2 | \ln 2x | 2\ln x <- \ln 2x | \ln(ab) <- \ln a\ln b
\ln\frac ab <- \frac{\ln a}{\ln b} | \ln(a+b) <- \ln a+\ln b | \log_2(8x) <- 3\log_2 x | \ln\sqrt x <- 2\ln x
\ln|x| <- \ln(-x) | \ln x <- \log_2 x | \ln(-x) | 2\ln|x| <- \ln|x| | \ln\frac1x <- \frac{1}{\ln x}
\ln x^2 <- \ln x+2
APPROXIMATIONS:: 12.57 <- \approx 12.58 | \approx 12.6 | 4\pi <- \approx 12.6 | \approx 12 | 5 <- 4 \approx 5
5 <- 5 \approx 7 | \not\approx 5 | 12.57 <- 5\pi \approx 12.57 | 4\pi <- 5\pi \approx 12.57 | 3\pi\approx 4\pi
2.5 <- x \approx 2.6 | \pi <- \approx 3 | 5 <- 7 \approx 5 | x \approx y | 0 <- 0\approx 0 | x <- x\approx x
3 <- \pi \approx 3.14 | 12.57 <- 12 \approx 13 | 4\pi <- 12.57 | x=2.5 <- y \approx 2.5
OPTIONS:: E <- A: E polygenic | B <- B: 5 or C: 7 | B. 5 or C. 7 | B) 5, C) 7 | B) or C) | B or C | A) B | B, C
B <- B) no, C | B) 5 or C | not B | not B) 5 | C: not B | A, B, C, D | B: or C | (A) (B) (C) | B and C | B) 5 and C) 6
B <- B. no wait, C | either B or C | A. Red B. Blue | (B) 5 (C) 7 | B: wrong, C is right | B / C | B) A) C)
B <- B is wrong | B: 5; C: 7 | b or c | B? C! | B. C. D. | [B] or [C]
MARKED OPTIONS:: \textbf{(C)}\ 12 <- 13 | B <- B: 5; C: 6 | \textbf{(C)}\ 12 <- B | (C) 13 | (B) 12
12 <- \textbf{(C)}\ 13 | \textbf{(C)}\ 12 <- \textbf{(D)}\ 12 | C, D | 12 or 13 | C or D | \textbf{(E)}\ \frac12 <- 2
\textbf{(A) }7 <- B) 7 | \textbf{(C)}\ 12 <- C12 | 1 | 12C | C <- \textbf{(D)}\ 12
\textbf{(C)}\ 12 <- (C) 12 or (D) 13 | 12 <- \textbf{(C)}\ 12 \textbf{(D)}\ 13 | (A) 11 (B) 12
SUMS:: \frac{n(n+1)}{2} <- \sum_{k=1}^{n-1} k | \sum_{k=1}^{n} k^2 | \sum_{k=1}^{n+1} k | 2^n <- \sum_{k=0}^{n} 2^k
2^n <- \sum_{k=1}^{n}\binom nk | n! <- \prod_{k=1}^{n-1} k | n^2 <- \sum_{k=1}^n (2k+1) | 55 <- \sum_{k=1}^{9} k
\frac{n(n+1)}{2} <- \sum_{k=1}^{n} n | \sum_{k=1}^n k <- \sum_{k=1}^m k | \frac{n(n-1)}{2} <- \sum_{k=1}^n k
\sum_{k=1}^n k <- \prod_{k=1}^n k | 2 <- \sum_{k=1}^\infty \frac1{2^k} | \frac{n(n+1)}{2} <- \sum_{k=0}^{n} 1
n(n+1)(2n+1)/6 <- \sum_{k=1}^n k | n <- \sum_{k=1}^{n} k | \sum_{k=1}^{n} a_k <- \sum_{k=1}^{n} b_k
"""
RIGHT_REALS = r"""
EXP:: e^{16} <- exp(16) | \exp(16) | e^{-x^2/2} <- \exp(-x^2/2) | e^x <- \exp x | e^{2x} <- exp(2x)
e^{16} <- \exp{16} | \exp\left(16\right) | \frac{1}{e} <- exp(-1) | e^{16} <- \operatorname{exp}(16) | e^{i\pi} <- -1
2e^{x} <- 2exp(x)
ABS:: |x| <- abs(x) | \operatorname{abs}(x) | |x-1| <- abs(x-1) | |x| <- \lvert x \rvert | \left|x\right|
|x| <- \vert x \vert | 3 <- abs(-3) | \sqrt{x^2} <- |x| | |x| <- \abs{x} | |x+2| <- \left\lvert x+2 \right\rvert
2|x| <- 2abs(x) | |x|+1 <- 1+\text{abs}(x)
ROOTS:: \sqrt{1/n} <- 1/\sqrt{n} | \frac{1}{\sqrt{n}} <- \sqrt{\frac1n}
\frac{\sqrt{a}}{\sqrt{b}} <- \sqrt{\frac{a}{b}} | \frac{\sqrt{2gh}}{g} <- \sqrt{\frac{2h}{g}}
\sqrt{2gh}/g <- \sqrt{2h/g} | \sqrt{ab} <- \sqrt a\sqrt b | 2\pi\sqrt{\frac{L}{g}} <- 2\pi\frac{\sqrt L}{\sqrt g}
\sqrt{\frac{k}{m}} <- \frac{\sqrt{km}}{m} | \sqrt{xy} <- \sqrt{x}\sqrt{y} | \frac{x}{\sqrt{x}} <- \sqrt{x}
\sqrt{\frac{A}{\pi}} <- \frac{\sqrt{A\pi}}{\pi} | \sqrt{\frac{3V}{\pi h}} <- \frac{\sqrt{3V}}{\sqrt{\pi h}}
\sqrt{4x} <- 2\sqrt{x} | \sqrt{x^3} <- x\sqrt{x} | \sqrt{8n} <- 2\sqrt{2n} | \sqrt[3]{8x} <- 2\sqrt[3]{x}
\sqrt[3]{\frac{3V}{4\pi}} <- \left(\frac{3V}{4\pi}\right)^{1/3} | r = \sqrt{A/\pi} <- r = \frac{\sqrt{A}}{\sqrt{\pi}}
POWERS:: x^{2/3} <- \sqrt[3]{x^2} | (x^2)^{1/3} | (\sqrt[3]{x})^2 | x^{3/2} <- x\sqrt{x} | \sqrt{x^3}
x^{-1/2} <- \frac{1}{\sqrt{x}} | x^{5/6} <- \sqrt{x}\sqrt[3]{x} | x^{1/4} <- \sqrt{\sqrt{x}}
\sqrt[4]{x^2} <- \sqrt{|x|} | (xy)^{1/2} <- x^{1/2}y^{1/2} | x^{0.5} <- \sqrt{x} | a^{3/4} <- \sqrt[4]{a^3}
x^{1/3} <- \sqrt[3]{x} | (x^6)^{1/3} <- x^2 | t^{1.5} <- t\sqrt t
LOGARITHMS:: \ln x^2 <- 2\ln x | \ln(x^2) <- 2\ln|x| | \ln(ab) <- \ln a+\ln b | \ln\frac{a}{b} <- \ln a-\ln b
\log_2(8x) <- 3+\log_2 x | \ln(x^3) <- 3\ln x | \ln\sqrt{x} <- \frac12\ln x | \log(xy) <- \log x+\log y
\ln(2x) <- \ln 2+\ln x | \ln\frac1x <- -\ln x | \ln(x^2y) <- 2\ln x+\ln y | e^{\ln x} <- x
\frac{\ln x}{\ln 2} <- \log_2 x | x\ln x^2 <- 2x\ln x
APPROXIMATIONS:: 12.57 <- \approx 12.57 | \approx 12.57 <- 12.57 | 12.57 <- \u2248 12.57 | \approx 12.57 \text{ cm}
12.57 <- \approx12.57 | \approx 5 <- \approx 5
MARKED OPTIONS:: \textbf{(C)}\ 12 <- (C) 12 | \textbf{(C)}\ 12 | (C) 12 <- \textbf{(C)}\ 12 | B <- (B) 12 | B. red
"""


def cases(text):
    """(gold, answer) of each pair: a gold stands before the first of its answers. A line may have a heading."""
    gold = ""
    for line in text.strip().splitlines():
        for pair in line.rpartition(":: ")[2].split(" | "):
            *golds, answer = pair.split(" <- ")
            gold = golds[0] if golds else gold
            yield tuple(
                re.sub(r"\\u([0-9a-f]{4})", lambda m: chr(int(m[1], 16)), text.strip()) for text in (gold, answer)
            )


def test_wrong_answers_that_look_right():
    pairs = list(cases(WRONG))
    assert len(pairs) >= 80 and [pair for pair in pairs if equal(*pair)] == []


def test_right_answers_that_look_wrong():
    pairs = list(cases(RIGHT))
    assert len(pairs) >= 60 and [pair for pair in pairs if not equal(*pair)] == []


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)])
def test_forms_that_are_equal_where_both_are_real(step):
    """Math-Verify#64 and #69 (roots, powers, logarithms, exp, abs), #16 and Gym#1844 (options with a text)."""
    assert [pair for pair in [*cases(WRONG_REALS)][::step] if equal(*pair)] == []
    assert [pair for pair in [*cases(RIGHT_REALS)][::step] if not equal(*pair)] == []


def product(golds, answers):
    return [(gold, answer) for gold in re.split(r" \| |\n", golds) for answer in re.split(r" \| |\n", answers)]


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_says_nothing_is_no_answer(is_whole):
    """0 = 0 was right for every equation, 0 > 0 for every inequality, 0 < 1 for the empty set."""
    made = product(GOLDS, SAYS_NOTHING)
    relations = [
        (gold, answer) for gold, answer in made if answer in ("0=0", "x=x", "k=k", "0>0", "0\\le 0", "0 \\ne 1")
    ]
    some = random.Random(1).sample(made, 150) + random.Random(2).sample(relations, 60)
    assert [pair for pair in (made if is_whole else some) if equal(*pair)] == []


def thousands(count, seed):
    """Numbers with separators, against lists of their groups and of other parts, in any order and bracket."""
    rng = random.Random(seed)
    for _ in range(count):
        value = rng.randint(1, 999) * 1000 ** rng.randint(1, 3) + rng.choice([0, 0, 2, 34, rng.randint(0, 999)])
        groups = f"{value:,}".split(",")
        bare = [group.lstrip("0") or "0" for group in groups]
        place = rng.randrange(1, len(str(value)))
        cut = [str(value)[:place], str(value)[place:].lstrip("0") or "0"]
        gold = rng.choice(["{}", "{}", "\\${}", "{} dollars", "x = {}", "-{}", "{}\\%", "{}.5", "{}\\pi"])
        gold = gold.format(rng.choice([",", ",", "{,}", " ", "\\,"]).join(groups))
        for parts in (groups, bare, bare[::-1], rng.sample(bare, len(bare)), cut, cut[::-1]):
            comma = rng.choice([", ", ",", "; ", " and ", " or "])
            form = rng.choice(["{}", "({})", "[{}]", "\\{{{}\\}}", "x = {}"])
            if form not in ("{}", "x = {}") or parts != groups or comma not in (",", ", "):
                yield gold, form.format(comma.join(parts))


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_a_number_is_no_list_of_its_groups(count):
    """1,000 was 1 and 0 in any order; GSM8K's answers have this form."""
    assert [pair for pair in thousands(count, seed=5) if equal(*pair)] == []
    for gold, answer in (("1,000", "1000"), ("x = 180,670,000", "180670000"), ("1,000 and 2,000", "1000, 2000")):
        assert equal(gold, answer) and equal(answer, gold)
    assert equal("1,234", "1, 234") and equal("1, 234", "1,234") and equal("(1, 234)", "(1,234)")
    assert not equal("1, 0", "1,000") and not equal("1,234", "234, 1")


def refused(made):
    """Asserts that nothing wrong is accepted; returns what right is refused, by kind, and the seconds of each pair."""
    accepted, refusals, seconds = [], [], []
    for kind, gold, answer, verdict in made:
        start = time.perf_counter()
        is_equal = equal(gold, answer)
        seconds.append(time.perf_counter() - start)
        if is_equal and not verdict:
            accepted.append((kind, gold, answer))
        if verdict and not is_equal:
            refusals.append((kind, gold, answer))
    assert accepted == []
    return refusals, seconds


def test_verdicts_by_construction():
    equal("x", "x+1")  # imports sympy
    refusals, seconds = refused(pairs(400, seed=12))
    assert refusals == [] and median(seconds) <= 0.005


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_verdicts_where_both_are_real(count):
    assert refused(pairs(count, seed=8, kinds=(reals,)))[0] == []


HUGE = r"""9^{9^{9^{9}}} | 1000000! | ((10^{10})!)! | 2^{2^{100}} | x^{100000}+y^{100000}-(x+y)^{100000} | n^{n^{n}}
(x+1)^{5000}-(x+1)^{4999} | \begin{pmatrix}1&2\\3&4\end{pmatrix}^{10^9} | (9^{99})^{999999} | 2^{\frac{10^{10}}{1}}
\binom{10^9}{5\cdot10^8} | x^{x^{x^{x}}} | e^{e^{e^{e^{x}}}} | \exp(\exp(\exp(\exp(10)))) | 7^{-10^{12}} | 10^{-10^{10}}
\sqrt{2}^{10^{12}} | (1+\frac{1}{10^9})^{10^9} | 0.5^{10^{10}} | \log(9^{9^{9}}) | 10000!
\left(\frac{1}{3}\right)^{10^8}"""


def test_a_huge_power_costs_milliseconds():
    """Each took a deadline and a worker."""
    for power in re.split(r" \| |\n", HUGE):
        start = time.process_time()
        assert not equal("5", power) and time.process_time() - start < 1, power
    for gold, answer in cases(r"2^{2024}-1 <- 4^{1012}-1 | e^{-e^{-x}} <- \exp(-\exp(-x)) | 100! <- 100\cdot 99!"):
        assert equal(gold, answer)


@pytest.mark.long
def test_10000_verdicts_by_construction():
    refusals, seconds = refused(pairs(10_000, seed=7))
    kinds = Counter(kind for kind, _, _ in refusals)
    print(f"median {1000 * median(seconds):.2f} ms, longest {max(seconds):.2f} s, refused: {kinds}")
    assert len(refusals) <= 50, refusals
    assert median(seconds) <= 0.005 and max(seconds) <= 6
    assert len({kind for kind, *_ in pairs(10_000, seed=7)}) >= len(KINDS) == 13


ALONE = """
import sys
sys.path[:0] = ["judges/tests"]
from math_pairs import pairs
from judges.math import equal
made = list(pairs(int(sys.argv[1]), seed=3))
order = sorted(range(len(made)), key=lambda place: hash((place * 7919) % len(made)), reverse=True)
verdicts = {place: equal(made[place][1], made[place][2]) for place in order}
print("".join(str(int(verdicts[place])) for place in range(len(made))))
"""


@pytest.mark.parametrize("count", [80, pytest.param(3000, marks=pytest.mark.long)])
def test_a_verdict_does_not_depend_on_what_was_graded_before(count):
    """Another order in a fresh process, with other hashes: sympy's caches and sets must not show."""
    command = [sys.executable, "-c", ALONE, str(count)]
    env = os.environ | {"PYTHONHASHSEED": "5", "PYTHONPATH": str(ROOT)}
    alone = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.strip()
    made = list(pairs(count, seed=3))
    random.Random(0).shuffle(order := list(range(count)))
    verdicts = {place: equal(made[place][1], made[place][2]) for place in order}
    assert "".join(str(int(verdicts[place])) for place in range(count)) == alone


# Each as often as 2,000 characters hold it, but for the last: nested, and numbers that few characters make long.
HOSTILE = ["{", "1,", "a", "x=", r"\pm", "_", "A_A", r"\frac", "five ", "5 feet ", "1/", "1:", r"\begin{pmatrix}", "<"]
HOSTILE = [part * (1999 // len(part)) for part in [*HOSTILE, "x<", r"\text{", "$", "1 234 "]]
HOSTILE += ["0x" + "F" * 1000, "5 " + "km " * 600, "5" + " " * 1900 + "x", "٣", "\uff15", "1e", "e5", "1e999"]
HOSTILE += ["9" * 1900 + "e999", "(" * 990 + "1" + ")" * 990, "(1," * 400 + "1" + ")" * 400]


def test_a_long_formula_is_not_parsed():
    """The parser of latex2sympy takes milliseconds a character: 3 s for 2,000 letters, with any gold."""
    for text in ("a" * 1999, "0x" + "F" * 1000, "A_A" * 600, "five " * 390):
        start = time.perf_counter()
        assert not equal("x+1", text) and time.perf_counter() - start < 1


@pytest.mark.long
def test_hostile_answers_score_nothing_and_end_in_time():
    pool = GraderPool(".math:grade", num_workers=1, deadline_s=1, memory_mib=2048, first=FIRST_JOB)
    for text in HOSTILE:
        reply = rf"\boxed{{{text}}}" if text.count("{") == text.count("}") else f"#### {text}"
        start = time.monotonic()
        (graded,) = pool.grade([{"answer": "7", "reply": reply, "strict": False}])
        outcome = graded.value["outcome"] if graded.outcome == "ok" else graded.outcome
        assert outcome in ("wrong", "parse_fail", "timeout"), (text[:40], graded)
        assert time.monotonic() - start < 6, text[:40]
    pool.close()


def test_grading_says_the_same_through_a_whole_reply():
    for gold, answer, outcome in (("5 cm", "5 km", "wrong"), ("2 hours", "2", "ok"), ("cat", "act", "wrong")):
        assert grade({"answer": gold, "reply": rf"so \boxed{{{answer}}}", "strict": False})["outcome"] == outcome
