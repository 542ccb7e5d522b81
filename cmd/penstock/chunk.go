package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/server"
)

func newChunk() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "chunk",
		Short: "List lost chunks, and accept their loss",
		Long: `A chunk is lost while no replica can serve it. A read of a file's bytes in the chunk
fails with EIO. If a server or disk comes back with a good replica, the bytes can be
read again. If no good replica will ever come back, accept the loss:

  penstock chunk lost                         # which chunks, of which files, and why
  penstock node remove NODE --force           # servers that will never come back,
  penstock disk replace DISK                  # and disks
  penstock chunk accept-loss --all --yes

From then on no command waits for the chunk, and a server that comes back with a
replica deletes the replica. The files stay: reads of the lost bytes fail with EIO for
good, and never return zeros, until the files are removed or written anew.`,
	}
	cmd.AddCommand(newChunkLost(), newChunkAcceptLoss())
	return cmd
}

// lostView is a lost chunk in the form that commands print.
type lostView struct {
	Volume           string `json:"volume" yaml:"volume"`
	server.LostChunk `yaml:",inline"`
}

// lostIn asks the owners of the named volumes, or of all volumes if only is empty, for their
// lost chunks.
func lostIn(ctx context.Context, s *client.Session, api *admin.Client, only []string) (views []lostView, ids map[string]meta.VolumeID, err error) {
	views, ids = []lostView{}, map[string]meta.VolumeID{}
	for v, err := range api.EachVolume(ctx, &admin.ListVolumesRequest{}) {
		if err != nil {
			return nil, nil, err
		}
		if !v.State.Usable() || len(only) > 0 && !slices.Contains(only, v.Name) {
			continue
		}
		ids[v.Name] = v.ID
		for q := (&admin.ListLostChunksRequest{Volume: admin.Numbered(v.ID)}); ; {
			page, err := api.Volumes.ListLostChunks(ctx, q)
			if err != nil {
				return nil, nil, fmt.Errorf("volume %s: %w", v.Name, err)
			}
			views = append(views, viewLost(v.Name, page.Chunks)...)
			if q.PageToken = page.NextPageToken; q.PageToken == "" {
				break
			}
		}
	}
	if len(only) > len(ids) {
		return nil, nil, usagef("not all of the volumes %v exist; see 'penstock volume list'", only)
	}
	return views, ids, nil
}

// viewLost converts lost chunks of a volume to the form that commands print.
func viewLost(volume string, chunks []*admin.LostChunk) (views []lostView) {
	for _, x := range chunks {
		v := lostView{Volume: volume, LostChunk: server.LostChunk{Files: []server.LostFile{}}}
		admin.Hear(&v.LostChunk, x)
		views = append(views, v)
	}
	return views
}

func lostTable(t *table, views []lostView) {
	t.row("VOLUME", "CHUNK", "STATE", "LIVE", "FILE", "BYTES", "REPLICAS")
	for _, v := range views {
		var why []string
		for _, r := range v.Replicas {
			why = append(why, fmt.Sprintf("node %d: %s", r.Server, r.Why))
		}
		row := []any{v.Volume, v.Chunk, v.State, bytesText(v.Live)}
		for i, f := range v.Files {
			name := f.Path
			if name == "" {
				name = fmt.Sprintf("(inode %d, only in snapshots, or open)", f.Ino)
			}
			if i == 0 {
				t.row(append(row, name, f.Bytes, strings.Join(why, "; "))...)
			} else {
				t.row("", "", "", "", name, f.Bytes)
			}
		}
		if len(v.Files) == 0 {
			t.row(append(row, "-", 0, strings.Join(why, "; "))...)
		}
		if v.More > 0 {
			t.row("", "", "", "", fmt.Sprintf("and %d more files", v.More))
		}
	}
}

func newChunkLost() *cobra.Command {
	var w where
	var out output
	var only []string
	cmd := &cobra.Command{
		Use:   "lost",
		Short: "List the chunks without a good replica, with their files",
		Long: `Lists the chunks without a reachable good replica. For each chunk the list has the
files with bytes in the chunk, by their paths in the volume. States:

  waits     a node or disk that may have a replica is out of reach, and was not given up
  damaged   only damaged replicas are left; they serve the bytes that match their
            checksums
  short     the chunk was being written, and its replicas end before the bytes that
            its writer synced
  lost      no node has a replica any more
  accepted  an administrator accepted the loss ('penstock chunk accept-loss')`,
		Example: `  penstock chunk lost
  penstock chunk lost --volume datasets --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return w.withAPI(cmd.Context(), func(s *client.Session, api *admin.Client) error {
				views, _, err := lostIn(cmd.Context(), s, api, only)
				if err != nil {
					return err
				}
				return out.print(cmd.OutOrStdout(), views, func(t *table) { lostTable(t, views) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	cmd.Flags().StringSliceVar(&only, "volume", nil, "volumes to look into (default all)")
	return cmd
}

func newChunkAcceptLoss() *cobra.Command {
	var w where
	var out output
	var only []string
	var all, damaged, yes bool
	cmd := &cobra.Command{
		Use:   "accept-loss [CHUNK...]",
		Short: "Accept that chunks are lost for good",
		Long: `Records that chunks are lost for good: the named chunks or, with --all, all chunks that
'penstock chunk lost' shows as lost or short. This can't be undone: a replica that
turns up later is deleted. The command refuses chunks whose nodes or disks may come
back and, without --damaged, chunks of which damaged replicas still serve a part.`,
		Example: `  penstock chunk accept-loss --all --volume datasets --yes
  penstock chunk accept-loss 00000003000000010000000000000007 --damaged --yes`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return usagef("name chunks, as 'penstock chunk lost' shows them, or give --all")
			}
			ctx := cmd.Context()
			return w.withAPI(ctx, func(s *client.Session, api *admin.Client) error {
				views, ids, err := lostIn(ctx, s, api, only)
				if err != nil {
					return err
				}
				give := map[string][]string{}
				var chosen []lostView
				left := slices.Clone(args)
				for _, v := range views {
					i := slices.Index(left, v.Chunk)
					if i >= 0 {
						left = slices.Delete(left, i, i+1)
					}
					if v.State != server.LossAccepted && (i >= 0 || all && (v.State == server.LossTotal || v.State == server.LossShort || damaged && v.State == server.LossDamaged)) {
						give[v.Volume], chosen = append(give[v.Volume], v.Chunk), append(chosen, v)
					}
				}
				if len(left) > 0 {
					return meta.E("accept loss", meta.NoSuchChunk, left[0], errors.New("'penstock chunk lost' does not show it"))
				}
				if len(chosen) == 0 {
					cmd.PrintErrln("nothing is lost that was not accepted")
					return nil
				}
				if !yes {
					lost := &table{w: newTabs(cmd.ErrOrStderr())}
					lostTable(lost, chosen)
					if err := lost.w.Flush(); err != nil {
						return err
					}
					if err := confirm(cmd, fmt.Sprintf("Give up %d chunks for good?", len(chosen)), "lost"); err != nil {
						return err
					}
				}
				done := []lostView{}
				for name, chunks := range give {
					l, lerr := acceptLoss(ctx, api, ids[name], chunks, damaged)
					done = append(done, viewLost(name, l)...)
					if lerr != nil {
						err = fmt.Errorf("volume %s: %w", name, lerr)
						break
					}
				}
				return errors.Join(out.print(cmd.OutOrStdout(), done, func(t *table) { lostTable(t, done) }), err)
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	f := cmd.Flags()
	f.StringSliceVar(&only, "volume", nil, "volumes to look into (default all)")
	f.BoolVar(&all, "all", false, "all that 'penstock chunk lost' shows as lost or short")
	f.BoolVar(&damaged, "damaged", false, "also give up the bytes that damaged replicas still serve")
	destroying(cmd, &yes)
	return cmd
}

// acceptAtOnce bounds the chunks of a single AcceptLoss request.
const acceptAtOnce = 1000

// acceptLoss accepts the loss of chunks of a volume. acceptLoss returns the chunks with a
// recorded loss; after an error, the chunks of the earlier requests.
func acceptLoss(ctx context.Context, api *admin.Client, v meta.VolumeID, chunks []string, damaged bool) (done []*admin.LostChunk, err error) {
	for some := range slices.Chunk(chunks, acceptAtOnce) {
		answer, err := api.Volumes.AcceptLoss(ctx, &admin.AcceptLossRequest{Volume: admin.Numbered(v), Chunks: some, Damaged: damaged})
		if err != nil {
			return done, err
		}
		done = append(done, answer.Chunks...)
	}
	return done, nil
}
