package peer

import (
	"fmt"
	"strconv"
	"strings"
)

// Worthless are the identities whose certificates are worth nothing: those of
// admissions below a number.
type Worthless map[string]uint64

// everyAdmission is above all admissions.
const everyAdmission = 1 << 32

// WorthlessBelow is how a list says that certificates of earlier admissions are refused:
// "role/name<3". Who knows no admissions takes that for nobody's name. An identity
// by itself, "role/name", is refused whatever its certificate says.
func WorthlessBelow(who string, n uint32) string { return fmt.Sprintf("%s<%d", who, n) }

// ParseWorthless reads a list. What it can't read is refused as a whole name,
// which is nobody's.
func ParseWorthless(list []string) Worthless {
	r := Worthless{}
	for _, x := range list {
		who, below, some := strings.Cut(x, "<")
		n, err := strconv.ParseUint(below, 10, 32)
		switch {
		case !some:
			r[x] = everyAdmission
		case err == nil:
			r[who] = max(r[who], n)
		}
	}
	return r
}

// Has tells whether an identity's certificate is refused. Who has none is not.
func (r Worthless) Has(i Identity) bool {
	return i.Role != "" && uint64(i.Admission) < r[i.String()]
}
