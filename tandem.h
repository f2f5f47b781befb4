// Everything a program needs, in one header.
#pragma once
#include <tandem/autograd/engine.h>
#include <tandem/autograd/function.h>
#include <tandem/autograd/functions.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/autograd/gradcheck.h>
#include <tandem/autograd/hooks.h>
#include <tandem/nn/init.h>
#include <tandem/nn/layers.h>
#include <tandem/nn/loss.h>
#include <tandem/nn/module.h>
#include <tandem/nn/sequential.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/device.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/tensor.h>
#include <tandem/tensor/threads.h>
