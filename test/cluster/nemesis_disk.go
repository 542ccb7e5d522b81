package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"
)

func (n *nemesis) ofDisks() []fault {
	return []fault{
		{"power cut of chunk server", []string{"chunk"}, 6 * time.Second, 3, n.power(n.chunks)},
		{"power cut of meta", []string{"meta"}, 6 * time.Second, 2, n.power(n.metas)},
		{"power cut of etcd", []string{"etcd"}, 6 * time.Second, 2, n.power(n.etcd)},
		{"full disk of chunk server", []string{"chunk"}, 8 * time.Second, 2, n.fill},
		{"disk given up and replaced", []string{"chunk", "policy"}, 5 * time.Second, 3, n.replace},
		{"flipped bit", []string{"flip"}, 0, 4, n.flip},
	}
}

func (n *nemesis) power(from func() []*Member) doing {
	return func(_ context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
		m := some(r, from())
		m.mayDie.Store(true) // before the kill: the member sees its disk fail
		err := m.CutPower()
		m.mayDie.Store(false)
		if err != nil {
			return "", nil, err
		}
		return m.Name, func(ctx context.Context) error {
			if err := m.Reboot(); err != nil {
				return err
			}
			return n.restart(m)(ctx)
		}, nil
	}
}

func (n *nemesis) fill(_ context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
	m := some(r, n.c.Chunks)
	release, err := m.disk.Fill(0)
	return m.Name, func(context.Context) error { return release() }, err
}

// located is the output of penstock locate.
type located struct {
	Path    string `json:"path"`
	Volume  string `json:"volume"`
	Size    uint64 `json:"size"`
	Inline  bool   `json:"inline"`
	Extents []struct {
		Offset      uint64   `json:"offset"`
		Length      uint64   `json:"length"`
		Chunk       string   `json:"chunk"`
		ChunkOffset uint64   `json:"chunk_offset"`
		Sealed      bool     `json:"sealed"`
		Servers     []uint64 `json:"servers"`
	} `json:"extents"`
}

// Locate asks where a file's bytes lie.
func (c *Cluster) Locate(ctx context.Context, path string) (*located, error) {
	out, err := c.Penstock(ctx, "locate", path, "--output", "json")
	if err != nil {
		return nil, err
	}
	var l located
	if err := json.Unmarshal(out, &l); err != nil {
		return nil, fmt.Errorf("penstock locate: %w\n%s", err, out)
	}
	return &l, nil
}

// ByID are the connected chunk servers by their numbers.
func (c *Cluster) ByID(ctx context.Context) (map[uint64]*Member, error) {
	s, err := c.Status(ctx)
	if err != nil {
		return nil, err
	}
	by := map[uint64]*Member{}
	for _, srv := range s.ChunkServers {
		for _, m := range c.Chunks {
			if srv.Address == m.addr(chunkPort) {
				by[srv.ID] = m
			}
		}
	}
	return by, nil
}

// dataFile is where a member keeps a chunk's bytes.
func (m *Member) dataFile(chunk string) string {
	return filepath.Join(m.disk.At, "d0", "chunks", chunk[len(chunk)-2:], chunk+".data")
}

// flip changes one bit of a sealed chunk on one disk, where another server has the same bytes: a
// chunk is damaged in one place only, ever.
func (n *nemesis) flip(ctx context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
	m := n.c.Mounts[0]
	var files []string
	err := filepath.WalkDir(filepath.Join(m.Path, some(r, soakVolumes).name), func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil // the chunk may be broken just now
		}
		files = append(files, path)
		return nil
	})
	if err != nil || len(files) == 0 {
		return "", nil, errNothing
	}
	by, err := n.c.ByID(ctx)
	if err != nil {
		return "", nil, errNothing
	}
	for range 10 {
		l, err := n.c.Locate(ctx, some(r, files))
		if err != nil {
			continue
		}
		for _, e := range l.Extents {
			if e.Chunk == "" || !e.Sealed || n.flips[e.Chunk] || len(e.Servers) < 2 || e.Length == 0 {
				continue
			}
			a, b := by[e.Servers[0]], by[e.Servers[1]]
			if r.IntN(2) == 0 {
				a, b = b, a
			}
			if a == nil || b == nil {
				continue
			}
			one, oerr := os.ReadFile(a.dataFile(e.Chunk))
			two, terr := os.ReadFile(b.dataFile(e.Chunk))
			at := int64(e.ChunkOffset) + r.Int64N(int64(e.Length))
			if oerr != nil || terr != nil || !slices.Equal(one, two) || at >= int64(len(one)) {
				continue
			}
			n.flips[e.Chunk] = true
			bit := r.IntN(8)
			return fmt.Sprintf("bit %d of byte %d of chunk %s on %s", bit, at, e.Chunk, a.Name), nil, flipBit(a.dataFile(e.Chunk), at, one[at]^1<<bit)
		}
	}
	return "", nil, errNothing
}

func flipBit(file string, at int64, b byte) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return errNothing // deleted meanwhile
		}
		return err
	}
	_, werr := f.WriteAt([]byte{b}, at)
	return errors.Join(werr, f.Sync(), f.Close())
}

func (n *nemesis) ofOrders() []fault {
	return []fault{
		{"change of policy", []string{"policy"}, 10 * time.Second, 2, n.policy},
		{"drain", []string{"policy"}, 25 * time.Second, 2, n.drain},
	}
}

// policy lets a volume have one copy more or less for a while.
func (n *nemesis) policy(ctx context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
	v := some(r, soakVolumes)
	set := func(ctx context.Context, replicas int) error {
		return eventually(ctx, time.Minute, func(ctx context.Context) error {
			_, err := n.c.Penstock(ctx, "volume", "set", v.name, "--force", "--replicas", fmt.Sprint(replicas))
			return err
		})
	}
	to := 5 - v.replicas // 2 and 3
	return fmt.Sprintf("%s gets %d copies", v.name, to), func(ctx context.Context) error { return set(ctx, v.replicas) }, set(ctx, to)
}

// drain empties a chunk server, and takes the server back, empty or not.
func (n *nemesis) drain(ctx context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
	by, err := n.c.ByID(ctx)
	if err != nil || len(by) == 0 {
		return "", nil, errNothing // nobody to ask just now
	}
	ids := slices.Sorted(maps.Keys(by))
	id := some(r, ids)
	order := func(ctx context.Context, more ...string) error {
		return eventually(ctx, time.Minute, func(ctx context.Context) error {
			_, err := n.c.Penstock(ctx, append([]string{"node", "drain", fmt.Sprint(id)}, more...)...)
			return err
		})
	}
	return by[id].Name, func(ctx context.Context) error { return order(ctx, "--cancel") }, order(ctx, "--yes")
}
