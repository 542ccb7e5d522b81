package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strings"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/placement"
)

// Level is a level of the topology /zone/.../rack/host.
type Level uint8

// Levels, from the widest. Anywhere is no level: a volume's place is its
// policy's, wherever its pods are.
const (
	Anywhere Level = iota
	Zone
	Rack
	Host
)

func parseLevel(s string) (Level, error) {
	for i, name := range []string{"none", "zone", "rack", "host"} {
		if s == name {
			return Level(i), nil
		}
	}
	return 0, errors.New("it is none, zone, rack or host")
}

// Keys of topology segments.
const (
	KeyZone = "topology.penstock.io/zone"
	KeyRack = "topology.penstock.io/rack"
	KeyHost = "topology.penstock.io/host"
)

// maxLabel is the longest value of a label in Kubernetes.
const maxLabel = 63

// Segments says of a place in the topology what labels can: of /z/r/h zone, rack
// and host; of /z/h no rack; of /h the host; of longer paths everything between
// zone and host is the rack, joined by dots. Of a subtree that is not a whole
// path (whole false) the last part is no host. What does not fit into a label is
// shortened: see label.
func Segments(at string, whole bool) map[string]string {
	if at == "" || at == "/" {
		return nil
	}
	parts := strings.Split(strings.Trim(at, "/"), "/")
	out := map[string]string{}
	put := func(key, value string) {
		if value != "" {
			out[key] = label(value)
		}
	}
	if whole {
		put(KeyHost, parts[len(parts)-1])
		parts = parts[:len(parts)-1]
	}
	if len(parts) > 0 {
		put(KeyZone, parts[0])
		put(KeyRack, strings.Join(parts[1:], "."))
	}
	return out
}

// label is a part of a place as the value of a label: itself where it is one, else
// what of it is, and a digest of the whole. Left out, a node had no place that a
// volume could ask for, and nobody was told.
func label(part string) string {
	const ends = ".-_"
	plain := strings.Trim(part, ends)
	if plain == part && len(part) <= maxLabel {
		return part
	}
	sum := sha256.Sum256([]byte(part))
	digest := hex.EncodeToString(sum[:4])
	if plain = plain[:min(len(plain), maxLabel-len(digest)-1)]; plain == "" {
		return digest
	}
	return plain + "-" + digest
}

// Within tells whether the place of a machine lies where segments say. Keys of
// others count for nothing.
func Within(at string, segments map[string]string) bool {
	have := Segments(at, true)
	for _, k := range []string{KeyZone, KeyRack, KeyHost} {
		if want, asked := segments[k]; asked && have[k] != want {
			return false
		}
	}
	return true
}

// Subtree cuts a machine's place down to a level.
func Subtree(at string, level Level) string {
	parts := strings.Split(strings.Trim(at, "/"), "/")
	n := len(parts)
	switch level {
	case Anywhere:
		return ""
	case Zone:
		n = min(n, 1)
	case Rack:
		n = max(n-1, 1)
	}
	return "/" + strings.Join(parts[:n], "/")
}

// Under tells whether a place lies in a subtree; "" and "/" are everything.
func Under(at, subtree string) bool {
	subtree = strings.TrimSuffix(subtree, "/")
	return at == subtree || strings.HasPrefix(at, subtree+"/")
}

// Site is one machine that stores bytes.
type Site struct {
	Topology string
	Disks    []Disk // those that take new bytes
	// Away: it does not answer, or takes nothing new, for now. It has no room, but it
	// counts where replicas are to lie apart.
	Away bool
}

// Disk is one of its disks.
type Disk struct {
	Class string
	Free  uint64 // bytes
}

// Meetable refuses a policy that the sites could not meet if all of them were there and
// empty. Errors: ResourceExceeded, which says what is missing.
func Meetable(sites []Site, p meta.Policy) error {
	servers := make([]placement.Server, len(sites))
	for i, s := range sites {
		servers[i] = placement.Server{ID: meta.ServerID(i + 1), Topology: s.Topology}
		for _, d := range s.Disks {
			servers[i].Disks = append(servers[i].Disks, placement.Disk{Class: d.Class, Total: 1})
		}
	}
	return placement.NewMap(servers).Meetable(&p)
}

// Capacity is how many bytes a volume of this policy could hold now, of the disks
// in its subtree: none if the sites can't meet it.
func Capacity(sites []Site, p meta.Policy) uint64 {
	if Meetable(sites, p) != nil {
		return 0
	}
	var free uint64
	for _, s := range sites {
		if s.Away || !Under(s.Topology, p.Topology) {
			continue
		}
		for _, d := range s.Disks {
			if p.Class == "" || d.Class == p.Class {
				free += d.Free
			}
		}
	}
	return free / uint64(max(p.Replicas, 1))
}

// Room is how many bytes a volume of a class could hold that Place would place for
// somebody where segments say (nil: anywhere). Those of a class without a level lie
// wherever the class says, so there is as much room for a pod on one machine as on
// any other; at a level, all of the rack or zone counts that the machine is in, not
// the machine's own disks alone.
func Room(c Class, sites []Site, segments map[string]string) uint64 {
	if segments == nil || c.Level == Anywhere && c.Policy.Topology == "" {
		return Capacity(sites, c.Policy)
	}
	var most uint64
	for _, s := range sites {
		if !s.Away && Within(s.Topology, segments) && Under(s.Topology, c.Policy.Topology) {
			p := c.Policy
			p.Topology = c.subtree(s)
			most = max(most, Capacity(sites, p))
		}
	}
	return most
}

// subtree is where a volume of the class lies that a site was chosen for.
func (c *Class) subtree(s Site) string {
	at := Subtree(s.Topology, c.Level)
	if !Under(at, c.Policy.Topology) {
		return c.Policy.Topology // the class is narrower than the level
	}
	return at
}

// Place settles where a volume's bytes lie. preferred and requisite are what the
// orchestrator asks for, best first; without both the policy stands. The first
// place with room for bytes is taken and becomes the policy's subtree, cut to the
// class's level. Errors: NoSpace.
func Place(c *Class, sites []Site, preferred, requisite []map[string]string, bytes uint64) error {
	if len(preferred)+len(requisite) == 0 {
		return nil
	}
	if c.Level == Anywhere {
		// Every node can read it; but bytes that the class ties to a place draw
		// pods there, so that a node elsewhere was not meant.
		for _, want := range append(preferred, requisite...) {
			for _, s := range sites {
				if !s.Away && Under(s.Topology, c.Policy.Topology) && Within(s.Topology, want) {
					return nil
				}
			}
			if c.Policy.Topology == "" {
				return nil
			}
		}
		return meta.E("place volume", meta.NoSpace, c.Policy.Topology, errors.New("the class's topology lies outside of every place that was asked for"))
	}
	for _, want := range append(preferred, requisite...) {
		for _, s := range sites {
			if s.Away || !Within(s.Topology, want) || !Under(s.Topology, c.Policy.Topology) {
				continue
			}
			p := c.Policy
			p.Topology = c.subtree(s)
			if free := Capacity(sites, p); free > 0 && free >= bytes {
				c.Policy = p
				return nil
			}
		}
	}
	return meta.E("place volume", meta.NoSpace, "", errors.New("no place that was asked for has chunk servers of the class with room for it"))
}
