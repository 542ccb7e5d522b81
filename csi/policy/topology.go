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

// Levels, from the widest to the narrowest. Anywhere is no level: the volume's place is its
// policy's topology, independent of the pods' nodes.
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
	return 0, errors.New("the value must be none, zone, rack or host")
}

// Keys of topology segments.
const (
	KeyZone = "topology.penstock.io/zone"
	KeyRack = "topology.penstock.io/rack"
	KeyHost = "topology.penstock.io/host"
)

// maxLabel is the longest value of a label in Kubernetes.
const maxLabel = 63

// Segments translates a place in the topology into labels: /z/r/h into zone, rack and host;
// /z/h into zone and host; /h into the host. In a longer path all components between zone and
// host, joined by dots, are the rack. If whole is false, at is a subtree: its last component
// is no host. label shortens a component too long for a label.
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

// label converts a component of a place into a label's value: the component itself if the
// component is a valid value, else its usable beginning and a digest of the whole component.
// Without such a value the node would have no place for a volume to request, and no error
// would say so.
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

// Within reports whether a machine's place lies in segments. Within ignores other keys than
// Penstock's.
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

// Under reports whether a place lies in a subtree; "" and "/" contain every place.
func Under(at, subtree string) bool {
	subtree = strings.TrimSuffix(subtree, "/")
	return at == subtree || strings.HasPrefix(at, subtree+"/")
}

// Site is a machine with a chunk server.
type Site struct {
	Topology string
	Disks    []Disk // disks that accept new bytes
	// Away: the chunk server does not answer, or accepts no new data for now. An away site has
	// no room, but counts as a separate place for replicas.
	Away bool
}

// Disk is a disk of a site.
type Disk struct {
	Class string
	Free  uint64 // bytes
}

// Meetable refuses a policy that the sites could not meet even if every site were present and
// empty. Errors: ResourceExceeded, which names the missing servers or disks.
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

// Capacity returns how many bytes a volume of this policy could hold now on the disks in the
// policy's subtree; 0 if the sites can't meet the policy.
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

// Room returns how many bytes a volume of class c could hold if Place places the volume for a
// pod within segments (nil: anywhere). Without a level, the class's own topology decides, so
// the room is the same for a pod on any machine. With a level, the room is the capacity of the
// whole zone or rack of the machine, not of the machine's own disks alone.
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

// subtree returns the topology of a volume of the class after site s was chosen.
func (c *Class) subtree(s Site) string {
	at := Subtree(s.Topology, c.Level)
	if !Under(at, c.Policy.Topology) {
		return c.Policy.Topology // the class is narrower than the level
	}
	return at
}

// Place sets the topology of the class's policy. preferred and requisite are the
// orchestrator's requests, best first; if both are empty, the policy stays unchanged. Place
// takes the first place with room for bytes, cut down to the class's level. Errors: NoSpace.
func Place(c *Class, sites []Site, preferred, requisite []map[string]string, bytes uint64) error {
	if len(preferred)+len(requisite) == 0 {
		return nil
	}
	if c.Level == Anywhere {
		// Every node can read the volume. But a topology set by the class draws pods to that
		// topology, so a request for a place outside of it must fail.
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
